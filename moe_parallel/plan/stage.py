"""The memory and the messages of a pipeline stage, composed of the parts of its model.

Megatron-Core's buffers of gradients, its optimizer's shares and its schedules are arithmetic here;
everything else was counted (`measure`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moe_parallel.config import Config
from moe_parallel.plan.layout import Group, Layout
from moe_parallel.plan.measure import Message, Part, Parts, Weight, measure

GRADIENT_BYTES = 4  # sums over micro-batches are fp32
MOMENT_BYTES = 8  # two fp32 numbers of Adam; Muon has one
MASTER_BYTES = 4  # an fp32 copy of a bf16 weight
SMALL = 24  # bytes of messages that are left out: the loss, the norm of the gradients

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, SEND = "all-to-all", "send"

#: What a message is for.
TENSOR, CONTEXT, DISPATCH, EXPERTS, PIPELINE, GRADIENTS, WEIGHTS, LOADS = (
    "tensor parallel", "context parallel", "dispatch", "weights of experts", "pipeline",
    "gradients", "weights", "loads",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A configuration in one layout, and its measured parts."""

    config: Config
    layout: Layout
    parts: Parts
    again: tuple[Parts, ...]  # without each of what is computed again

    @classmethod
    def of(cls, config: Config, layout: Layout, vocabulary: int, mean: float | None) -> Model:
        """Measures the parts. `vocabulary`: padded. `mean`: experts of a token."""
        training, again = config.training, []
        for module in layout.recompute_modules:
            others = tuple(other for other in layout.recompute_modules if other != module)
            changed = replace(
                training,
                recompute_granularity="selective" if others else None,
                recompute_modules=others or None,
            )
            again.append(replace(config, training=changed))
        if layout.recompute:
            changed = replace(training, recompute_granularity=None, recompute_modules=None)
            again.append(replace(config, training=changed))
        whole = (measure(each, vocabulary, mean) for each in again)
        return cls(config, layout, measure(config, vocabulary, mean), tuple(whole))

    @property
    def value(self) -> int:
        """Bytes of a weight and of an activation."""
        return 2 if self.config.training.bf16 else 4

    def parts_of_chunk(self, stage: int, chunk: int) -> list[Part]:
        """The parts of a chunk of a pipeline rank in their order."""
        layout, moe_layers = self.layout, self.config.moe_layers
        numbers = layout.chunk_layers(len(moe_layers), stage, chunk)
        found = [self.parts.layers[moe_layers[number]] for number in numbers]
        if layout.begins(stage, chunk):
            found.insert(0, self.parts.embedding)
        if layout.ends(stage, chunk):
            found.append(self.parts.head)
        return found

    def parts_of_stage(self, stage: int) -> list[Part]:
        chunks = range(self.layout.virtual)
        return [part for chunk in chunks for part in self.parts_of_chunk(stage, chunk)]

    def weights_of_chunk(self, stage: int, chunk: int) -> list[Weight]:
        """In the order in which the model registers them."""
        layout = self.layout
        found = [w for part in self.parts_of_chunk(stage, chunk) for w in part.weights]
        tied = not self.config.model.untie_embeddings_and_output_weights
        if tied and layout.ends(stage, chunk) and not layout.begins(stage, chunk):
            found += [weight for weight in self.parts.embedding.weights if weight.table]
        return found

    def shares_table(self) -> bool:
        """Whether the first and the last stage each have the tied table of the vocabulary."""
        tied = not self.config.model.untie_embeddings_and_output_weights
        return tied and self.layout.pp > 1


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, at the largest moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept for the backward passes of all micro-batches in flight
    working: int  # an estimate: the largest results of one operator
    state: int = 0  # numbers of the selection that are not weights: cutoffs, the table of hash

    @property
    def total(self) -> int:
        trained = self.weights + self.gradients + self.optimizer + self.state
        return trained + self.activations + self.working


def memory_of_stage(model: Model, stage: int, dp_rank: int = 0) -> Memory:
    """The memory of a rank of a pipeline stage.

    Args:
        dp_rank: its number among the ranks of cp and dp, which divide the optimizer state
            unequally where weights end.
    """
    layout, bf16 = model.layout, model.config.training.bf16
    buffers = [b for chunk in range(layout.virtual) for b in buffers_of_chunk(model, stage, chunk)]
    numbers = sum(end - begin for b in buffers for each in b.buckets for begin, end in each.weights)
    padded = sum(buffer.size for buffer in buffers)
    parts = model.parts_of_stage(stage)
    return Memory(
        # The distributed optimizer gathers weights in a buffer that is padded like the gradients'.
        weights=model.value * (padded if layout.distributed_optimizer else numbers),
        gradients=GRADIENT_BYTES * padded,
        optimizer=moment_bytes(model, stage, dp_rank)
        + (MASTER_BYTES if bf16 else 0) * updated_numbers(model, stage, dp_rank),
        activations=activations_of_stage(model, stage),
        working=max(part.largest for part in parts),
        state=sum(part.state for part in parts),
    )


def updated_numbers(model: Model, stage: int, dp_rank: int = 0) -> int:
    """The numbers of weights that a rank updates."""
    layout, total = model.layout, 0
    for chunk in range(layout.virtual):
        for buffer in buffers_of_chunk(model, stage, chunk):
            ranks = layout.weight_group(buffer.apart).size
            total += (
                sum(bucket.owned(dp_rank % ranks, ranks) for bucket in buffer.buckets)
                if layout.distributed_optimizer
                else buffer.size
            )
    return total


def weights_of_muon(model: Model, stage: int) -> list[Weight]:
    """The weights of a rank that Muon orthogonalizes; [] with Adam."""
    if model.config.optimizer.optimizer != "muon":
        return []
    chunks = range(model.layout.virtual)
    held = [w for chunk in chunks for w in model.weights_of_chunk(stage, chunk)]
    return [weight for weight in held if weight.matrices[0]]


def moment_bytes(model: Model, stage: int, dp_rank: int = 0) -> int:
    """The bytes of the moments that a rank updates."""
    muon = sum(weight.size for weight in weights_of_muon(model, stage))
    return MOMENT_BYTES * updated_numbers(model, stage, dp_rank) - MOMENT_BYTES // 2 * muon


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


def activations_of_stage(model: Model, stage: int) -> int:
    """Bytes kept for the backward passes, at the largest moment of a step."""
    layout, shared = model.layout, model.parts.shared
    chunks = [
        sum(part.kept for part in model.parts_of_chunk(stage, chunk))
        for chunk in range(layout.virtual)
    ]

    def held_by(counts: tuple[int, ...]) -> int:
        sizes = zip(counts, chunks, strict=True)
        return sum(shared + count * size for count, size in sizes if count)

    held = max(map(held_by, chunks_in_flight(layout, stage)))
    # What is computed again has its activations for a moment: one layer, or one module, at a time.
    again = (
        whole.layers[is_moe].kept - (0 if layout.recompute else model.parts.layers[is_moe].kept)
        for whole in model.again
        for is_moe in whole.layers
    )
    return held + max(again, default=0)


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


@dataclass(frozen=True)
class Buffer:
    """The buckets of the weights of a chunk that are reduced over the same ranks."""

    apart: bool  # over edp instead of dp
    buckets: tuple[Bucket, ...]

    @property
    def size(self) -> int:
        return sum(bucket.size for bucket in self.buckets)


def buffers_of_chunk(model: Model, stage: int, chunk: int) -> list[Buffer]:
    """The gradient buffers of a chunk: of dense weights, and of expert weights if apart."""
    layout, alone = model.layout, model.shares_table()
    weights, found = model.weights_of_chunk(stage, chunk), []
    for apart in (False, True):
        mine = [w for w in weights if (w.expert and layout.experts_reduce_apart) == apart]
        if not mine:
            continue
        least = None
        if layout.overlap_grad_reduce and stage == 0 and chunk == 0:
            least = layout.bucket_size or max(40_000_000, 1_000_000 * layout.dp)
        sizes = [(weight.size, alone and weight.table) for weight in mine]
        ranks, distributed = layout.weight_group(apart).size, layout.distributed_optimizer
        found.append(Buffer(apart, tuple(buckets(sizes, ranks, distributed, least))))
    return found


def buckets(
    weights: Sequence[tuple[int, bool]], ranks: int, distributed: bool, least: int | None
) -> list[Bucket]:
    """The buckets of one buffer, by the rules of Megatron-Core 0.16.1.

    Weights come in reverse order. With the distributed optimizer a weight begins at a multiple of
    64 and a bucket ends at one of 128 and of the number of ranks.

    Args:
        weights: all of one chunk that are reduced over the same ranks: the size of each, and
            whether it has a bucket of its own.
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

    for size, shared in reversed(weights):
        alone = shared and distributed
        position = _padded(position, 64) if distributed else position
        if alone and places:
            position = close(position)
        places.append((position, position + size))
        position += size
        if alone or (least is not None and position - begin >= least):
            position = close(position)
    if places:
        close(position)
    return found


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class Wire:
    """Bytes that a rank sends, by the kind of link."""

    node: float = 0.0  # to ranks of its node
    network: float = 0.0  # to other nodes


@dataclass(frozen=True)
class Collective:
    """An operation that a rank does `times` in a step.

    `size` is the number of bytes that it gives to the operation: of an all-gather its own part, of
    a reduce-scatter and an all-reduce the whole, of an all-to-all all parts but its own.
    """

    purpose: str
    kind: str
    group: Group
    size: int
    times: int

    def wire(self, node_size: int) -> Wire:
        """The bytes that a rank sends in one such operation.

        Gather and reduction run in rings over the nodes, as NCCL builds them: every byte passes
        each node's border once, and the ranks of a node share the network.
        """
        ranks, here = self.group.size, self.group.on_node(node_size)
        if self.kind == ALL_TO_ALL:
            to_node = self.size * (here - 1) / (ranks - 1)
            return Wire(to_node, self.size - to_node)
        if self.kind == SEND:
            across = 0.0 if here == ranks else self.size / here
            return Wire(self.size - across, across)
        in_ring = (
            self.size
            * {
                ALL_GATHER: ranks - 1.0,
                REDUCE_SCATTER: (ranks - 1) / ranks,
                ALL_REDUCE: 2 * (ranks - 1) / ranks,
            }[self.kind]
        )
        return Wire(in_ring if here > 1 else 0.0, in_ring / here if here < ranks else 0.0)


def messages_of_stage(model: Model, stage: int) -> list[Collective]:
    """All messages of a rank of a pipeline stage in one step."""
    layout = model.layout
    found: Counter[tuple[str, str, Group, int]] = Counter()

    def add(purpose: str, kind: str, group: Group, size: int, times: int) -> None:
        if group.size > 1 and size > (SMALL if kind == ALL_REDUCE else 0):
            found[purpose, kind, group, size] += times

    parts = model.parts_of_stage(stage)
    everyone = Group("stage", layout.tp * layout.cp * layout.dp, 1)
    for part in parts:
        for message, times in part.messages.items():
            group, purpose = Group("", message.ranks, message.stride), _purpose(layout, message)
            add(purpose, message.kind, group, message.size, times * layout.micro_batches)
    for part in parts:
        for message, times in part.after_step.items():
            group = everyone if message.ranks == 0 else Group("", message.ranks, message.stride)
            add(LOADS, message.kind, group, message.size, times)
    for each in (*_pipeline(model, stage), *_gradients(model, stage)):
        add(each.purpose, each.kind, each.group, each.size, each.times)
    return [Collective(*key, times=times) for key, times in found.items()]


def _purpose(layout: Layout, message: Message) -> str:
    if message.kind == ALL_TO_ALL:
        return DISPATCH
    if (message.ranks, message.stride) == (layout.cp, layout.tp) and layout.cp > 1:
        return CONTEXT
    shares_tokens = (message.ranks, message.stride) in ((layout.tp, 1), (layout.tp * layout.cp, 1))
    return TENSOR if shares_tokens else EXPERTS


def _pipeline(model: Model, stage: int) -> Iterator[Collective]:
    layout, training = model.layout, model.config.training
    if layout.pp == 1:
        return
    tokens = training.seq_length // layout.cp * layout.micro_batch
    if layout.sequence_parallel:
        tokens //= layout.tp
    size, passes = tokens * model.config.model.hidden_size * model.value, layout.micro_batches
    every = layout.virtual * passes
    forward = every - (passes if stage == layout.pp - 1 else 0)
    backward = every - (passes if stage == 0 else 0)
    yield Collective(PIPELINE, SEND, layout.pp_group, size, forward + backward)


def _gradients(model: Model, stage: int) -> Iterator[Collective]:
    """The gradients of a step over data-parallel ranks, and the updated weights back; those of
    weights that several ranks of a pipeline, or of tp, hold completely."""
    layout = model.layout
    for chunk in range(layout.virtual):
        buffers = buffers_of_chunk(model, stage, chunk)
        # Megatron-Core has an optimizer for dense weights and one for expert weights. Each gathers
        # all weights after its update, unless they are gathered in the next forward pass.
        gathers = 1 if layout.overlap_param_gather else len(buffers)
        for buffer in buffers:
            group = layout.weight_group(buffer.apart)
            for bucket in buffer.buckets:
                kind = REDUCE_SCATTER if layout.distributed_optimizer else ALL_REDUCE
                yield Collective(GRADIENTS, kind, group, bucket.size * GRADIENT_BYTES, 1)
                if layout.distributed_optimizer:
                    part = bucket.size // group.size * model.value
                    yield Collective(WEIGHTS, ALL_GATHER, group, part, gathers)
    weights = [w for chunk in range(layout.virtual) for w in model.weights_of_chunk(stage, chunk)]
    size = GRADIENT_BYTES * sum(weight.size for weight in weights if weight.over_tp)
    yield Collective(GRADIENTS, ALL_REDUCE, layout.tp_group, size, 1)
    if model.shares_table():
        ends = Group("first and last stage", 2, (layout.pp - 1) * layout.pp_group.stride)
        for weight in weights:
            if weight.table:
                yield Collective(GRADIENTS, ALL_REDUCE, ends, GRADIENT_BYTES * weight.size, 1)
