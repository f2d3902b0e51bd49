"""The memory of a rank: weights, gradients, optimizer state, activations, working memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from moe_parallel.config import recompute
from moe_parallel.plan.activations import (
    kept_beside_layers,
    kept_by_embedding,
    kept_by_head,
    kept_by_layer,
    kept_by_recomputed_layer,
)
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.shape import Shape
from moe_parallel.plan.tokens import Kept, tokens_of
from moe_parallel.plan.weights import EMBEDDING, Buffer, buffers_of_chunk, weights_of_chunk

GRADIENT_BYTES = 4  # bytes: sums over micro-batches are fp32
MOMENT_BYTES = 8  # two fp32 numbers of Adam
MASTER_BYTES = 4  # an fp32 copy of a bf16 weight


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, at the largest moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept for the backward passes of all micro-batches in flight
    working: int  # an estimate: the largest intermediate results of one operation
    state: int = 0  # numbers of the selection that are not weights: cutoffs, the table of hash

    @property
    def total(self) -> int:
        trained = self.weights + self.gradients + self.optimizer + self.state
        return trained + self.activations + self.working


def memory_of_stage(shape: Shape, layout: Layout, stage: int, dp_rank: int = 0) -> Memory:
    """The memory of a rank of a pipeline stage.

    Args:
        dp_rank: its number among the ranks of cp and dp, which divide the optimizer state
            unequally where weights end.
    """
    numbers, padded, states = numbers_of_stage(shape, layout, stage, dp_rank)
    return Memory(
        # The distributed optimizer gathers weights in a buffer that is padded like the gradients'.
        weights=shape.value * (padded if layout.distributed_optimizer else numbers),
        gradients=GRADIENT_BYTES * padded,
        optimizer=states * (MOMENT_BYTES + (MASTER_BYTES if shape.bf16 else 0)),
        activations=activations_of_stage(shape, layout, stage),
        working=_working(shape, layout, stage),
        state=_state_of_stage(shape, layout, stage),
    )


def numbers_of_stage(
    shape: Shape, layout: Layout, stage: int, dp_rank: int = 0
) -> tuple[int, int, int]:
    """Numbers of weights, the same with padding, and of weights that a rank updates."""
    chunks = range(layout.virtual)
    buffers = [b for chunk in chunks for b in buffers_of_chunk(shape, layout, stage, chunk)]
    return (
        sum(end - begin for b in buffers for each in b.buckets for begin, end in each.weights),
        sum(buffer.size for buffer in buffers),
        sum(_states(buffer, layout, dp_rank) for buffer in buffers),
    )


def _state_of_stage(shape: Shape, layout: Layout, stage: int) -> int:
    if shape.experts is None:
        return 0
    moe_layers = sum(
        layout.kinds_of_layer(shape.moe_layers, stage, chunk)[True]
        for chunk in range(layout.virtual)
    )
    return moe_layers * shape.experts.routing.state


def _states(buffer: Buffer, layout: Layout, dp_rank: int) -> int:
    """The numbers of weights that this rank updates."""
    if not layout.distributed_optimizer:
        return buffer.size
    ranks = layout.weight_group(buffer.apart).size
    return sum(bucket.owned(dp_rank % ranks, ranks) for bucket in buffer.buckets)


def weights_by_part(shape: Shape, layout: Layout, stage: int) -> dict[str, int]:
    """The bytes of a stage's weights by part of the model, without padding."""
    parts: Counter[str] = Counter()
    for chunk in range(layout.virtual):
        for weight in weights_of_chunk(shape, layout, stage, chunk):
            parts[weight.part] += weight.size * shape.value
    return dict(parts)


def activations_by_part(shape: Shape, layout: Layout, stage: int) -> dict[str, int]:
    """The bytes that a stage keeps of one micro-batch, by part of the model."""
    parts: Counter[str] = Counter()
    for chunk in range(layout.virtual):
        for kept in kept_by_chunk(shape, layout, stage, chunk):
            parts[kept.part] += kept.nbytes
    return dict(parts)


def kept_by_chunk(shape: Shape, layout: Layout, stage: int, chunk: int) -> list[Kept]:
    """What a chunk keeps of one micro-batch for its backward pass."""
    kept: list[Kept] = []
    if layout.begins(stage, chunk):
        kept += kept_by_embedding(shape, layout)
    kept += kept_beside_layers(shape, layout)
    kinds = layout.kinds_of_layer(shape.moe_layers, stage, chunk)
    if _keeps_token_ids(shape, layout, stage, chunk):
        kept.append(Kept("token ids for the layers", EMBEDDING, tokens_of(shape, layout).all * 8))
    for is_moe, count in kinds.items():
        if layout.recompute:
            kept += count * kept_by_recomputed_layer(shape, layout)
        else:
            kept += count * kept_by_layer(shape, layout, is_moe)
    if layout.ends(stage, chunk):
        kept += kept_by_head(shape, layout)
    return kept


def _keeps_token_ids(shape: Shape, layout: Layout, stage: int, chunk: int) -> bool:
    """Whether layers keep the ids of the tokens to be computed again, besides the embedding."""
    if shape.experts is None or not shape.experts.routing.reads_token_ids:
        return False
    of_experts = layout.kinds_of_layer(shape.moe_layers, stage, chunk)[True] > 0
    again = layout.recompute or (of_experts and recompute.EXPERTS in layout.recompute_modules)
    # With tp, the embedding keeps other numbers: those of its part of the vocabulary.
    return again and not (layout.begins(stage, chunk) and layout.tp == 1)


def chunks_in_flight(layout: Layout, stage: int) -> set[tuple[int, ...]]:
    """The numbers of micro-batches, by chunk of a rank, whose activations exist at the same time.

    One tuple for each forward pass, at its end. A rank runs `ahead` forward passes before forward
    and backward passes alternate: pp - stage - 1 in the plain schedule (1F1B), and 2 (pp - stage -
    1) + (virtual - 1) pp in the interleaved one, which takes pp micro-batches through a chunk
    before the next chunk (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """
    pp, chunks = layout.pp, layout.virtual
    ahead = pp - stage - 1 if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * pp
    passes = layout.micro_batches * chunks
    counts, found = [0] * chunks, set()
    for forward in range(min(passes, ahead + 2 * pp * chunks)):  # then it repeats
        counts[forward // pp % chunks] += 1
        found.add(tuple(counts))
        if forward >= min(ahead, passes - 1):
            counts[chunks - 1 - (forward - ahead) // pp % chunks] -= 1
    return found


def activations_of_stage(shape: Shape, layout: Layout, stage: int) -> int:
    """Bytes kept for the backward passes, at the largest moment of a step."""
    chunks = [
        sum(kept.nbytes for kept in kept_by_chunk(shape, layout, stage, chunk))
        for chunk in range(layout.virtual)
    ]
    shared = sum(kept.nbytes for kept in kept_beside_layers(shape, layout))

    def held_by(counts: tuple[int, ...]) -> int:
        sizes = zip(counts, chunks, strict=True)
        return sum(shared + count * (size - shared) for count, size in sizes if count)

    held = max(map(held_by, chunks_in_flight(layout, stage)))
    kinds, again = set(shape.moe_layers), layout.recompute_modules
    if layout.recompute:  # one layer at a time has all of its activations again
        return held + max(_bytes_of_layer(shape, layout, is_moe) for is_moe in kinds)
    return held + max(
        (_bytes_of_module(shape, layout, is_moe, module) for is_moe in kinds for module in again),
        default=0,
    )


def _bytes_of_module(shape: Shape, layout: Layout, is_moe: bool, module: str) -> int:
    """What a module that is computed again has for its own backward pass."""
    others = tuple(other for other in layout.recompute_modules if other != module)
    kept = replace(layout, recompute_modules=others)
    return _bytes_of_layer(shape, kept, is_moe) - _bytes_of_layer(shape, layout, is_moe)


def _bytes_of_layer(shape: Shape, layout: Layout, is_moe: bool) -> int:
    return sum(kept.nbytes for kept in kept_by_layer(shape, layout, is_moe))


def _working(shape: Shape, layout: Layout, stage: int) -> int:
    """The larger of: a chunk of logits with its gradient; the gradients inside an expert layer."""
    t, a = tokens_of(shape, layout), shape.value
    logits = 0
    if stage == layout.pp - 1:
        of_logit = a if shape.fused_softmax else 4 + 2 * a  # the gradient is written over them
        logits = min(t.all, shape.loss_chunk) * shape.vocabulary // layout.tp * of_logit
    width = 2 * shape.dense_width // layout.tp
    inside = t.all * width * a if not all(shape.moe_layers) else 0
    if shape.experts is not None:
        inside = max(inside, t.received * (3 * shape.experts.width // layout.etp) * a)
    return max(logits, inside + 2 * t.all * shape.hidden * a)
