"""The messages of a rank in one step, and how many of their bytes cross each kind of link.

The symbols are those of `activations`. Messages of at most 24 bytes (the norm of the gradients, the
loss that is reported) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from moe_parallel.config import recompute
from moe_parallel.plan.experts import LayerWeight, PlannedExperts
from moe_parallel.plan.layout import Group, Layout
from moe_parallel.plan.shape import Shape
from moe_parallel.plan.tokens import TokenCounts, tokens_of
from moe_parallel.plan.weights import buffers_of_chunk, weights_of_chunk

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, SEND = "all-to-all", "send"

#: What a message is for: the groups of `Collective.purpose`.
TENSOR, CONTEXT, DISPATCH, PIPELINE, GRADIENTS, WEIGHTS, W_DOWN, COUPLING, LOADS = (
    "tensor parallel", "context parallel", "dispatch", "pipeline", "gradients", "weights", "W_down",
    "coupling loss", "loads",
)  # fmt: skip

SMALL = 24  # bytes of messages that are left out
SHARED_GATE = "w_shared_gate"


@dataclass(frozen=True)
class Wire:
    """Bytes that a rank sends, by the kind of link."""

    node: float = 0.0  # to ranks of its node
    network: float = 0.0  # to other nodes

    def __add__(self, other: Wire) -> Wire:
        return Wire(self.node + other.node, self.network + other.network)

    def times(self, factor: float) -> Wire:
        return Wire(self.node * factor, self.network * factor)


@dataclass(frozen=True)
class Collective:
    """An operation that a rank does `times` in a step.

    `size` is the number of bytes that it gives to the operation: of an all-gather its own part, of
    a reduce-scatter and an all-reduce the whole, of an all-to-all all parts but its own.
    """

    name: str
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


def messages_of_stage(shape: Shape, layout: Layout, stage: int) -> list[Collective]:
    """All messages of a rank of a pipeline stage in one step; those of other groups than its own,
    and of groups of one, do not exist."""
    found: list[Collective] = []
    for chunk in range(layout.virtual):
        if layout.begins(stage, chunk):
            found += _embedding(shape, layout)
        ends = layout.ends(stage, chunk)
        kinds = layout.kinds_of_layer(shape.moe_layers, stage, chunk)
        if ends and shape.further:
            kinds[shape.moe_layers[-1]] += shape.further
        for is_moe, count in kinds.items():
            of_layer = messages_of_layer(shape, layout, is_moe)
            of_layer += _loads(shape, layout, is_moe)
            found += [replace(each, times=each.times * count) for each in of_layer]
        if ends:
            found += list(_head(shape, layout)) * (1 + shape.further)
        found += _reduction(shape, layout, stage, chunk)
    found += _pipeline(shape, layout, stage)
    found += _shared_gradients(shape, layout, stage)
    return _merged(each for each in found if each.group.size > 1 and each.times and each.size)


def _merged(found: Iterable[Collective]) -> list[Collective]:
    """Equal operations of several layers as one, with the sum of their times."""
    times: dict[tuple[str, str, str, Group, int], int] = {}
    for each in found:
        key = (each.name, each.purpose, each.kind, each.group, each.size)
        times[key] = times.get(key, 0) + each.times
    return [Collective(*key, times=number) for key, number in times.items()]


def messages_of_layer(shape: Shape, layout: Layout, is_moe: bool) -> list[Collective]:
    """The messages of one layer in all micro-batches of a step."""
    # Latent attention gathers what is between its two products.
    inner = None if shape.latent is None else shape.latent.inner * shape.value
    found = [*_divided_block(shape, layout, "attention", gathered=inner)]
    found += _keys_and_values(shape, layout)
    if not is_moe:
        return [*found, *_divided_block(shape, layout, "dense layer", recompute.DENSE)]
    assert shape.experts is not None
    t = tokens_of(shape, layout)
    found += _routing(shape, layout, t, shape.experts)
    if layout.etp_ep_group.size > 1:
        found += _dispatch(shape, layout, t, shape.experts)
    if shape.experts.norms is not None and shape.experts.norms.gathers_w_down:
        found += _gathered_w_down(shape, layout, shape.experts)
    if shape.experts.routing.coupled:
        found += _coupling(shape, layout, shape.experts)
    if shape.experts.shared is not None:
        found += _divided_block(shape, layout, "shared expert", layout.shared_module)
    return found


def _passes(layout: Layout, module: str | None = None) -> tuple[int, int]:
    """The numbers of forward and of backward passes of a module of a layer in a step.

    `module`: its name in --recompute-modules; None: it has none.
    """
    again = layout.recompute or module in layout.recompute_modules
    return layout.micro_batches * (2 if again else 1), layout.micro_batches


def _keys_and_values(shape: Shape, layout: Layout) -> Iterator[Collective]:
    """Those of whole sequences for the attention of a share, and their gradients back."""
    forward, backward = _passes(layout, recompute.CORE_ATTENTION)
    width = 2 * shape.groups * shape.head_width // layout.tp
    part, group = tokens_of(shape, layout).all * width * shape.value, layout.cp_group
    yield Collective("keys and values", CONTEXT, ALL_GATHER, group, part, forward)
    whole = part * layout.cp
    yield Collective("dk and dv", CONTEXT, REDUCE_SCATTER, group, whole, backward)


def _divided_block(
    shape: Shape, layout: Layout, name: str, module: str | None = None, gathered: int | None = None
) -> Iterator[Collective]:
    """Two products divided over tp: by columns, then by rows.

    `gathered`: bytes of a token's input to the first product; None: those of an activation.
    """
    t, y = tokens_of(shape, layout), _row(shape)
    x = y if gathered is None else gathered
    forward, backward = _passes(layout, module)

    def over_tp(what: str, kind: str, size: int, times: int) -> Collective:
        return Collective(f"{name}: {what}", TENSOR, kind, layout.tp_group, size, times)

    if layout.sequence_parallel:
        yield over_tp("x", ALL_GATHER, t.between * x, forward)
        yield over_tp("x, again for the weight's gradient", ALL_GATHER, t.between * x, backward)
        yield over_tp("dy", ALL_GATHER, t.between * y, backward)
        yield over_tp("y", REDUCE_SCATTER, t.all * y, forward)
        yield over_tp("dx", REDUCE_SCATTER, t.all * x, backward)
    else:
        yield over_tp("y", ALL_REDUCE, t.all * y, forward)
        yield over_tp("dx", ALL_REDUCE, t.all * x, backward)


def _row(shape: Shape) -> int:
    """The bytes of a token's activation."""
    return shape.hidden * shape.value


def _routing(
    shape: Shape, layout: Layout, t: TokenCounts, experts: PlannedExperts
) -> Iterator[Collective]:
    """What an expert layer sends over tp and cp, whose ranks share the tokens of a micro-batch."""
    forward, backward = _passes(layout, recompute.EXPERTS)
    group, together = layout.tp_group, layout.tp_cp_group

    def over_tp(what: str, kind: str, size: int, times: int) -> Collective:
        return Collective(f"experts: {what}", TENSOR, kind, group, size, times)

    purpose = CONTEXT if layout.tp == 1 else TENSOR
    for kept in experts.routing.kept:
        if kept.summed:
            size = kept.nbytes(t.routed, t.slots, experts.scores, layout.micro_batch)
            what = f"experts: {kept.name}"
            yield Collective(what, purpose, ALL_REDUCE, together, size, backward)
    if experts.routing.gathers_scores:
        size = t.routed * experts.scores * 4
        yield Collective("experts: scores", purpose, ALL_GATHER, together, size, backward)
    if layout.sequence_parallel:
        return
    yield over_tp("y of all tokens", ALL_GATHER, t.routed * _row(shape), forward)
    yield over_tp("dx of all tokens", ALL_GATHER, t.routed * _row(shape), backward)
    for weight in experts.replicated:
        if weight.name == SHARED_GATE:  # its tokens are not split
            continue
        size = weight.size * (4 if weight.in_fp32 else shape.value)
        if size > SMALL:
            times = _uses(weight, layout, experts) * backward
            yield over_tp(f"dw of {weight.name}", ALL_REDUCE, size, times)


def _uses(weight: LayerWeight, layout: Layout, experts: PlannedExperts) -> int:
    """How often a layer uses a weight that every rank holds, each time with a gradient."""
    if weight.in_fp32:
        return 2 if experts.routing.coupled else 1
    if weight.name != "w_down" or experts.norms is None:
        return 1
    alone = layout.etp_ep_group.size == 1
    # For the norms, and for C of the rows.
    return 1 if experts.norms.sends_c or (alone and experts.norms.passes_on_c) else 2


def _coupling(shape: Shape, layout: Layout, experts: PlannedExperts) -> Iterator[Collective]:
    """Of --moe-erc-loss-coeff, whose first forward pass of two has no loss."""
    times, n = layout.micro_batches, experts.number
    local, ep, etp = n // layout.ep, layout.ep_group, layout.etp_group
    yield Collective("squares of norms", COUPLING, ALL_REDUCE, etp, local * n * 4, times)
    yield Collective("norms of own rows", COUPLING, ALL_GATHER, ep, local * 4, times)
    yield Collective("gradients of these", COUPLING, REDUCE_SCATTER, ep, n * 4, times)


def _loads(shape: Shape, layout: Layout, is_moe: bool) -> Iterator[Collective]:
    """What ranks that route in a layer add up after a step, to move biases and cutoffs."""
    if not is_moe or shape.experts is None:
        return
    group = Group("stage", layout.tp * layout.cp * layout.dp, 1)
    for size in shape.experts.routing.step_sums:
        if size > SMALL:
            yield Collective("loads of the experts", LOADS, ALL_REDUCE, group, size, 1)


def _dispatch(
    shape: Shape, layout: Layout, t: TokenCounts, experts: PlannedExperts
) -> Iterator[Collective]:
    """Rows to the experts' ranks, and outputs back; in the backward pass the other way round."""
    forward, backward = _passes(layout, recompute.EXPERTS)
    group = layout.etp_ep_group
    rows = t.sent * layout.etp * (group.size - 1) // group.size  # that leave the rank

    def over_ep(what: str, size: int, times: int) -> Collective:
        return Collective(f"dispatch: {what}", DISPATCH, ALL_TO_ALL, group, size, times)

    counts = experts.number * layout.etp * 8
    sends_c = experts.norms is not None and experts.norms.sends_c
    there, what = shape.packed_row, ", C" if sends_c else ""
    yield over_ep("rows of each expert", counts * (group.size - 1) // group.size, forward)
    yield over_ep(f"x{what} and probs", rows * there, forward)
    yield over_ep("y", rows * _row(shape), forward)
    yield over_ep("dy", rows * _row(shape), backward)
    yield over_ep(f"dx{what.replace('C', 'dC')} and dprobs", rows * there, backward)


def _gathered_w_down(shape: Shape, layout: Layout, experts: PlannedExperts) -> Iterator[Collective]:
    """W_down of all experts for the norms, and of this rank's experts for C of the rows."""
    assert experts.norms is not None
    forward, backward = _passes(layout, recompute.EXPERTS)
    gathers = 2 * backward  # a forward pass that is repeated serves the backward pass
    every = experts.number * shape.hidden * experts.norms.rank * shape.value
    here = every // layout.ep
    part = here // layout.etp
    ep, etp = layout.ep_group, layout.etp_group
    # C that is sent is not computed again: W_down is then gathered for it, but not used.
    of_rows, back = (forward, 0) if experts.norms.sends_c else (gathers, backward)
    yield Collective("W_down for the norms", W_DOWN, ALL_GATHER, etp, part, gathers)
    yield Collective("W_down for the norms", W_DOWN, ALL_GATHER, ep, here, gathers)
    yield Collective("W_down of the rows", W_DOWN, ALL_GATHER, etp, part, of_rows)
    yield Collective("dw of the norms", W_DOWN, REDUCE_SCATTER, ep, every, backward)
    yield Collective("dw of the norms", W_DOWN, REDUCE_SCATTER, etp, here, backward)
    yield Collective("dw of the rows", W_DOWN, REDUCE_SCATTER, etp, here, back)


def _embedding(shape: Shape, layout: Layout) -> Iterator[Collective]:
    t, row, times = tokens_of(shape, layout), _row(shape), layout.micro_batches
    tp = layout.tp_group
    if layout.sequence_parallel:
        yield Collective("embedding: y", TENSOR, REDUCE_SCATTER, tp, t.all * row, times)
        yield Collective("embedding: dy", TENSOR, ALL_GATHER, tp, t.between * row, times)
    else:
        yield Collective("embedding: y", TENSOR, ALL_REDUCE, tp, t.all * row, times)


def _head(shape: Shape, layout: Layout) -> Iterator[Collective]:
    t, row, times = tokens_of(shape, layout), _row(shape), layout.micro_batches
    tp = layout.tp_group
    if layout.sequence_parallel:
        yield Collective("output layer: x", TENSOR, ALL_GATHER, tp, t.between * row, times)
        yield Collective("output layer: dx", TENSOR, REDUCE_SCATTER, tp, t.all * row, times)
    else:
        yield Collective("output layer: dx", TENSOR, ALL_REDUCE, tp, t.all * row, times)
    whole, rest = divmod(t.all, shape.loss_chunk)
    for tokens, chunks in ((shape.loss_chunk, whole), (rest, 1)):
        yield Collective("loss: maxima", TENSOR, ALL_REDUCE, tp, tokens * 4, chunks * times)
        yield Collective("loss: sums", TENSOR, ALL_REDUCE, tp, tokens * 8, chunks * times)


def _pipeline(shape: Shape, layout: Layout, stage: int) -> Iterator[Collective]:
    if layout.pp == 1:
        return
    size, passes = tokens_of(shape, layout).between * _row(shape), layout.micro_batches
    every, pp = layout.virtual * passes, layout.pp_group
    forward = every - (passes if stage == layout.pp - 1 else 0)
    backward = every - (passes if stage == 0 else 0)
    yield Collective("activations to the next stage", PIPELINE, SEND, pp, size, forward)
    yield Collective("gradients to the previous stage", PIPELINE, SEND, pp, size, backward)


def _reduction(shape: Shape, layout: Layout, stage: int, chunk: int) -> Iterator[Collective]:
    """The gradients of a chunk over its data-parallel ranks, and the updated weights back."""
    buffers = buffers_of_chunk(shape, layout, stage, chunk)
    # Megatron-Core has an optimizer for dense weights and one for expert weights. Each gathers all
    # weights after its update, unless they are gathered in the next forward pass.
    gathers = 1 if layout.overlap_param_gather else len(buffers)
    for buffer in buffers:
        group = layout.weight_group(buffer.apart)
        whose = "expert" if buffer.apart else "dense"
        for bucket in buffer.buckets:
            gradients = f"gradients of {whose} weights"
            if not layout.distributed_optimizer:
                yield Collective(gradients, GRADIENTS, ALL_REDUCE, group, bucket.size * 4, 1)
                continue
            yield Collective(gradients, GRADIENTS, REDUCE_SCATTER, group, bucket.size * 4, 1)
            part = bucket.size // group.size * shape.value
            yield Collective(f"{whose} weights", WEIGHTS, ALL_GATHER, group, part, gathers)


def _shared_gradients(shape: Shape, layout: Layout, stage: int) -> Iterator[Collective]:
    """Gradients of weights that several ranks of a pipeline, or of tp, hold completely."""
    weights = [
        weight
        for chunk in range(layout.virtual)
        for weight in weights_of_chunk(shape, layout, stage, chunk)
    ]
    if layout.sequence_parallel:
        whole = {"input_layernorm", "pre_mlp_layernorm", "final_layernorm"}
        if shape.experts is not None:
            whole |= {weight.name for weight in shape.experts.replicated}
        size = 4 * sum(weight.size for weight in weights if weight.name in whole)
        name = "norms and weights that score"
        yield Collective(name, GRADIENTS, ALL_REDUCE, layout.tp_group, size, 1)
    for weight in weights:
        if weight.shared_embedding:
            ends = Group("first and last stage", 2, (layout.pp - 1) * layout.pp_group.stride)
            yield Collective("tied embedding", GRADIENTS, ALL_REDUCE, ends, 4 * weight.size, 1)


def wire_of(messages: Iterable[Collective], node_size: int) -> Wire:
    """The bytes that a rank sends in a step."""
    total = Wire()
    for each in messages:
        total += each.wire(node_size).times(each.times)
    return total
