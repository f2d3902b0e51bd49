"""The weights of a rank, and the buffers in which Megatron-Core sums and reduces gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_parallel.plan.layout import Layout
from moe_parallel.plan.shape import Shape

#: The parts of a model by which a plan splits memory and time.
EMBEDDING, ATTENTION, DENSE, SCORING, EXPERTS, SHARED, HEAD = (
    "embedding", "attention", "dense layers", "router or W_down", "experts", "shared expert",
    "output layer",
)  # fmt: skip


_PARTS = {
    "w_router": SCORING,
    "w_down": SCORING,
    "w_free": SCORING,
    "b": SCORING,
    "w_neurons_gate_up": SCORING,
    "w_neurons_out": SCORING,
    "w_shared_gate": SHARED,
    "shared_fc1": SHARED,
    "shared_fc2": SHARED,
}


@dataclass(frozen=True)
class Weight:
    """A weight as one rank holds it."""

    name: str
    part: str
    size: int  # in numbers
    expert: bool = False  # divided by ep and etp
    apart: bool = False  # reduced over edp instead of dp
    shared_embedding: bool = False  # tied, with pipeline stages: it has a bucket of its own


def weights_of_chunk(shape: Shape, layout: Layout, stage: int, chunk: int) -> list[Weight]:
    """The weights of a chunk of a pipeline rank, in the order in which the model registers them."""
    found = []
    begins, ends = layout.begins(stage, chunk), layout.ends(stage, chunk)
    table, copied = shape.vocabulary * shape.hidden // layout.tp, shape.tied and layout.pp > 1
    if begins:
        found.append(Weight("embedding", EMBEDDING, table, shared_embedding=copied))
    for layer in layout.chunk_layers(len(shape.moe_layers), stage, chunk):
        found += _layer(shape, layout, shape.moe_layers[layer])
    if ends:
        found += _further(shape, layout)
        found.append(Weight("final_layernorm", HEAD, shape.hidden))
        if not shape.tied or not begins:
            found.append(Weight("output_layer", HEAD, table, shared_embedding=copied))
    return found


def _further(shape: Shape, layout: Layout) -> list[Weight]:
    """Layers that predict a further token, from the last layer's output and the next embedding."""
    d = shape.hidden
    if not shape.further:
        return []
    each = [
        Weight("further_layernorm", HEAD, 3 * d),  # of both inputs, and the final one
        Weight("further_proj", HEAD, 2 * d * d // layout.tp),
        *_layer(shape, layout, shape.moe_layers[-1]),
    ]
    return each * shape.further


def _layer(shape: Shape, layout: Layout, is_moe: bool) -> list[Weight]:
    d, tp = shape.hidden, layout.tp
    part = EXPERTS if is_moe else DENSE
    found = [
        Weight("input_layernorm", ATTENTION, d),
        *_attention(shape, tp),
        Weight("pre_mlp_layernorm", part, d),
    ]
    if not is_moe:
        return [
            *found,
            Weight("linear_fc1", DENSE, d * 2 * shape.dense_width // tp),
            Weight("linear_fc2", DENSE, shape.dense_width * d // tp),
        ]
    assert shape.experts is not None
    divisors = {"none": 1, "tp": tp, "experts": layout.ep * layout.etp}
    for weight in shape.experts.weights:
        part = _PARTS.get(weight.name, EXPERTS)
        expert = weight.divided_by == "experts"
        found.append(
            Weight(
                weight.name,
                part,
                weight.size // divisors[weight.divided_by],
                expert=expert,
                apart=expert and layout.experts_reduce_apart,
            )
        )
    return found


def _attention(shape: Shape, tp: int) -> list[Weight]:
    d, latent = shape.hidden, shape.latent
    if latent is None:
        return [
            Weight("linear_proj", ATTENTION, shape.query_width * d // tp),
            Weight("linear_qkv", ATTENTION, d * shape.qkv_width // tp),
        ]
    heads = shape.heads // tp
    return [
        Weight("linear_proj", ATTENTION, heads * latent.values * d),
        Weight("linear_down", ATTENTION, d * latent.inner),  # every rank of tp has all of it
        Weight("latent_layernorm", ATTENTION, latent.queries + latent.keys),
        Weight("linear_q_up", ATTENTION, latent.queries * heads * (latent.plain + latent.turned)),
        Weight("linear_kv_up", ATTENTION, latent.keys * heads * (latent.plain + latent.values)),
    ]


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together: numbers from `start` to `end` of a buffer."""

    start: int
    end: int  # padding included
    weights: tuple[tuple[int, int], ...]  # where each weight begins and ends

    @property
    def size(self) -> int:
        return self.end - self.start

    def owned(self, rank: int, ranks: int) -> int:
        """The numbers of weights, without padding, in the share of one of the ranks."""
        each = self.size // ranks
        first = self.start + rank * each
        return sum(
            max(0, min(end, first + each) - max(start, first)) for start, end in self.weights
        )


def buckets(
    weights: Sequence[Weight], ranks: int, distributed: bool, least: int | None
) -> list[Bucket]:
    """The buckets of one buffer, by the rules of Megatron-Core 0.16.1.

    Weights come in reverse order. With the distributed optimizer a weight begins at a multiple of
    64 and a bucket ends at one of 128 and of the number of ranks.

    Args:
        weights: all of one chunk that are reduced over the same ranks.
        ranks: over which they are reduced.
        distributed: whether these ranks divide the optimizer state.
        least: numbers in a bucket; None: everything is one bucket.
    """
    found: list[Bucket] = []
    places: list[tuple[int, int]] = []
    begin = position = 0

    def close(end: int) -> int:
        nonlocal begin, places
        end = _padded(end, math.lcm(ranks, 128)) if distributed else end
        found.append(Bucket(begin, end, tuple(places)))
        begin, places = end, []
        return end

    for weight in reversed(weights):
        alone = weight.shared_embedding and distributed
        position = _padded(position, 64) if distributed else position
        if alone and places:
            position = close(position)
        places.append((position, position + weight.size))
        position += weight.size
        if alone or (least is not None and position - begin >= least):
            position = close(position)
    if places:
        close(position)
    return found


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class Buffer:
    """The buckets of the weights of a chunk that are reduced over the same ranks."""

    apart: bool  # over edp instead of dp
    buckets: tuple[Bucket, ...]

    @property
    def size(self) -> int:
        return sum(bucket.size for bucket in self.buckets)


def buffers_of_chunk(shape: Shape, layout: Layout, stage: int, chunk: int) -> list[Buffer]:
    """The gradient buffers of a chunk: of dense weights, and of expert weights if apart."""
    weights = weights_of_chunk(shape, layout, stage, chunk)
    found = []
    for apart in (False, True):
        mine = [weight for weight in weights if weight.apart == apart]
        if not mine:
            continue
        least = None
        if layout.overlap_grad_reduce and stage == 0 and chunk == 0:
            least = layout.bucket_size or max(40_000_000, 1_000_000 * layout.dp)
        ranks = layout.weight_group(apart).size
        found.append(
            Buffer(apart, tuple(buckets(mine, ranks, layout.distributed_optimizer, least)))
        )
    return found
