"""What a GPU computes: the FLOPs and the bytes of memory traffic of each operation.

The symbols are those of `activations`. A product of [m, k] and [k, n] has 2 m k n FLOPs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moe_parallel.config import recompute
from moe_parallel.config.selection import SharedExpertSize
from moe_parallel.config.selection.kept import Neurons, Scoring
from moe_parallel.plan.experts import Free, PlannedExperts
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.memory import GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES
from moe_parallel.plan.products import Product
from moe_parallel.plan.shape import Latent, Shape
from moe_parallel.plan.tokens import tokens_of
from moe_parallel.plan.weights import ATTENTION, DENSE, EXPERTS, HEAD, SCORING, SHARED

#: The kernels that do the work, by which `Efficiency` and peaks are chosen.
LINEAR, EXPERT_PRODUCTS, CORE_ATTENTION, TRAFFIC = "linear", "experts", "attention", "traffic"
FP32 = "fp32"  # products that are fp32 in a bf16 model, too
#: Modules that Megatron-Core recomputes and this program does not know, with their operations.
_MODULES = {
    "mla_up_proj": ((ATTENTION, "linear_q_up"), (ATTENTION, "linear_kv_up")),
    "moe_act": ((EXPERTS, "SwiGLU"),),
}
_NORM, _RESIDUAL, _COUPLING = "RMSNorm", "residual", "coupling loss"


@dataclass(frozen=True)
class Work:
    """One operation on one rank: forward and backward, for one micro-batch."""

    name: str
    part: str
    kernel: str
    flops: float  # forward
    backward_flops: float
    nbytes: float  # of memory traffic, forward
    backward_bytes: float
    fp8: bool = False
    # By which the speed of the FLOPs is lowered; none: it is not.
    products: tuple[Product, ...] = ()
    backward_products: tuple[Product, ...] = ()
    of_model: bool = True  # not computed again, nor a loss on weights

    def times(self, factor: float) -> Work:
        return replace(
            self,
            flops=self.flops * factor,
            backward_flops=self.backward_flops * factor,
            nbytes=self.nbytes * factor,
            backward_bytes=self.backward_bytes * factor,
        )


def planned_product(
    name: str,
    part: str,
    kernel: str,
    sizes: tuple[float, float, float],
    a: int,
    *,
    matrices: int = 1,
    fp8: bool = False,
) -> Work:
    """Of x [m, k] and w [k, n]: y forward, dx and dw backward.

    dw is written, read, and added to its fp32 sum over micro-batches. In FP8 the factors are read
    and written once more to be rounded.

    Args:
        sizes: m, k, n; m over all matrices.
        a: bytes of a number.
        matrices: the number of matrices w, each for its part of the rows.
    """
    m, k, n = sizes
    flops, x, w, y = 2 * m * k * n, m * k, matrices * k * n, m * n
    summed = (2 * a + 2 * GRADIENT_BYTES) * w
    rounded, rounded_back = (3 * (x + w), 3 * (x + 2 * y)) if fp8 else (0, 0)
    return Work(
        name, part, kernel, flops, 2 * flops,
        a * (x + w + y) + rounded,
        2 * a * (x + w + y) + summed + rounded_back,
        fp8,
        (Product(m / matrices, n, k, matrices),),
        (Product(m / matrices, k, n, matrices), Product(k, n, m / matrices, matrices)),
    )  # fmt: skip


def traffic(name: str, part: str, forward: float, backward: float) -> Work:
    """An operation that is limited by its memory traffic, in bytes."""
    return Work(name, part, TRAFFIC, 0, 0, forward, backward)


def work_of_layer(shape: Shape, layout: Layout, is_moe: bool) -> list[Work]:
    """The operations of one layer on one micro-batch."""
    found = list(_attention(shape, layout))
    t, d, a, tp = tokens_of(shape, layout), shape.hidden, shape.value, layout.tp
    if not is_moe:
        f, fp8 = shape.dense_width, shape.fp8_linear
        gate_up, down = (t.all, d, 2 * f / tp), (t.all, f / tp, d)
        return [
            *found,
            *_norm_and_residual(shape, layout, DENSE),
            planned_product("linear_fc1", DENSE, LINEAR, gate_up, a, fp8=fp8),
            traffic("SwiGLU", DENSE, 3 * t.all * f / tp * a, 5 * t.all * f / tp * a),
            planned_product("linear_fc2", DENSE, LINEAR, down, a, fp8=fp8),
        ]
    assert shape.experts is not None
    found += _norm_and_residual(shape, layout, EXPERTS)
    found += _scores(shape, layout, shape.experts)
    found += _experts(shape, layout, shape.experts)
    if shape.experts.free is not None:
        found += _free(shape, layout, shape.experts.free)
    if shape.experts.routing.coupled:
        found.append(_coupling(shape, layout, shape.experts))
    if shape.experts.shared is not None:
        found += _shared(shape, layout, shape.experts.shared)
    return found


def _attention(shape: Shape, layout: Layout) -> Iterator[Work]:
    t, d, a, tp = tokens_of(shape, layout), shape.hidden, shape.value, layout.tp
    q, fp8 = shape.query_width, shape.fp8_linear
    yield from _norm_and_residual(shape, layout, ATTENTION)
    if shape.latent is not None:
        yield from _latent_attention(shape, layout, shape.latent)
        return
    qkv = (t.all, d, shape.qkv_width / tp)
    yield planned_product("linear_qkv", ATTENTION, LINEAR, qkv, a, fp8=fp8)
    turned = t.all * (q + shape.groups * shape.head_width) / tp * a
    yield traffic("rope", ATTENTION, 2 * turned, 2 * turned)
    # Two products with the S x S scores, of which a causal mask leaves half; five in the backward
    # pass, which repeats one of them.
    scores = 2 * t.all * shape.seq_length * q / tp * shape.seen
    kv = shape.qkv_width - q  # of whole sequences
    moved = 2 * t.all * (2 * q + layout.cp * kv) / tp * a
    yield Work(
        "attention", ATTENTION, CORE_ATTENTION, scores, 2.5 * scores, moved / 2, 3 * moved / 2
    )
    yield planned_product("linear_proj", ATTENTION, LINEAR, (t.all, q / tp, d), a, fp8=fp8)


def _latent_attention(shape: Shape, layout: Layout, latent: Latent) -> Iterator[Work]:
    """In the unfolded form, which training uses: every head has keys and values of its own."""
    t, d, a = tokens_of(shape, layout), shape.hidden, shape.value
    heads, head = shape.heads / layout.tp, latent.plain + latent.turned

    def of(name: str, tokens: float, k: float, n: float) -> Work:
        return planned_product(name, ATTENTION, LINEAR, (tokens, k, n), a, fp8=shape.fp8_linear)

    yield of("linear_q_down", t.between, d, latent.queries)
    yield of("linear_kv_down", t.between, d, latent.keys + latent.turned)
    normed = t.between * (latent.queries + latent.keys) * a
    yield traffic("norms of the latents", ATTENTION, 2 * normed, 3 * normed)
    yield of("linear_q_up", t.all, latent.queries, heads * head)
    yield of("linear_kv_up", t.all, latent.keys, heads * (latent.plain + latent.values))
    # A part of q and k is turned; k is copied next to the part that all heads share.
    turned = t.all * heads * (2 * latent.turned + head + latent.plain) * a
    yield traffic("rope", ATTENTION, turned, turned)
    # Two products forward, five backward, of which three are as wide as the keys.
    scores = t.all * shape.seq_length * heads * shape.seen
    forward = scores * (head + latent.values)
    backward = scores * (3 * head + 2 * latent.values)
    moved = t.all * heads * 2 * (head + latent.values) * a
    yield Work("attention", ATTENTION, CORE_ATTENTION, forward, backward, moved, 3 * moved)
    yield of("linear_proj", t.all, heads * latent.values, d)


def work_of_further_layers(shape: Shape, layout: Layout) -> list[Work]:
    """What layers that predict a further token compute besides a layer and the head."""
    t, d, count = tokens_of(shape, layout), shape.hidden, shape.further
    if not count:
        return []
    row = t.between * d * shape.value
    sizes = (t.all, 2 * d, d / layout.tp)
    found = [
        traffic("norms of a further token", HEAD, 6 * row, 9 * row),
        planned_product("further_proj", HEAD, LINEAR, sizes, shape.value, fp8=shape.fp8_linear),
    ]
    return [work.times(count) for work in found]


def _norm_and_residual(shape: Shape, layout: Layout, part: str) -> Iterator[Work]:
    row = tokens_of(shape, layout).between * shape.hidden * shape.value
    yield traffic(_NORM, part, 2 * row, 3 * row)
    yield traffic(_RESIDUAL, part, 3 * row, 3 * row)


def _scores(shape: Shape, layout: Layout, experts: PlannedExperts) -> Iterator[Work]:
    """The router, or the norms of C = x W_down of all experts."""
    t, d, n = tokens_of(shape, layout), shape.hidden, experts.scores
    if isinstance(experts.scoring, Scoring):
        yield _norms(shape, layout, experts, experts.scoring)
    elif isinstance(experts.scoring, Neurons):
        yield from _neurons(shape, layout, experts, experts.scoring)
    else:
        a = shape.value
        yield traffic("router: x in fp32", SCORING, t.routed * d * (a + 4), t.routed * d * (a + 4))
        h = experts.router_hidden
        if h is not None:
            yield planned_product("first layer of the router", SCORING, FP32, (t.routed, d, h), 4)
        yield planned_product("router", SCORING, FP32, (t.routed, h or d, n), 4)
    yield traffic("selection", SCORING, 6 * 4 * t.routed * n, 6 * 4 * t.routed * n)


def _norms(shape: Shape, layout: Layout, experts: PlannedExperts, scoring: Scoring) -> Work:
    t, d, n, a = tokens_of(shape, layout), shape.hidden, experts.number, shape.value
    r, flops = scoring.rank, 2.0 * t.routed * d * n * scoring.rank
    if scoring.all_norms_learn:  # dx and dw, and C once more
        back = flops * (3 if scoring.recomputes_scores else 2)
    else:
        has_c = scoring.passes_on_c and (layout.etp_ep_group.size == 1 or scoring.sends_c)
        back = flops * experts.per_token / n * (2 if has_c else 3)
    x, w, c = t.routed * d, n * d * r, t.routed * n * r
    kept = 0 if scoring.recomputes_scores else c
    return Work(
        "norms of C", SCORING, LINEAR, flops, back,
        a * (x + w + kept), back / flops * a * (x + w + c) + (2 * a + 2 * GRADIENT_BYTES) * w,
        products=(Product(t.routed, r, d, n),),
        backward_products=(Product(t.routed, d, r, n), Product(d, r, t.routed, n)),
    )  # fmt: skip


def _neurons(
    shape: Shape, layout: Layout, experts: PlannedExperts, neurons: Neurons
) -> Iterator[Work]:
    """UoE's routing neurons of all experts: one dense layer, whose activations have norms."""
    t, d, a = tokens_of(shape, layout), shape.hidden, shape.value
    f = experts.number * neurons.each
    size, copied = t.routed * f, 2 * GRADIENT_BYTES if neurons.copied else 0
    yield planned_product("routing neurons", SCORING, LINEAR, (t.routed, d, 2 * f), a)
    yield traffic("SwiGLU of routing neurons", SCORING, 3 * size * a, 5 * size * a)
    yield traffic("norms of routing neurons", SCORING, size * (a + copied), size * (2 * a + copied))
    if neurons.gated:
        yield traffic("u by the probs", SCORING, 2 * size * a, 4 * size * a)
    yield planned_product("output of routing neurons", SCORING, LINEAR, (t.routed, f, d), a)


def _free(shape: Shape, layout: Layout, free: Free) -> Iterator[Work]:
    """The outputs of free experts, for a rank's own tokens."""
    t, d, constants = tokens_of(shape, layout), shape.hidden, free.constants
    row = d * shape.value
    if constants:
        x = t.routed * d * (shape.value + 4)
        yield traffic("constant experts: x in fp32", EXPERTS, x, x)
        yield planned_product(
            "constant experts: W_c x", EXPERTS, FP32, (t.routed, d, 2 * constants), 4
        )
        sizes = (t.routed, constants, d)
        yield planned_product("constant experts: v", EXPERTS, LINEAR, sizes, shape.value)
    # x by its share in fp32, rounded, and added to the output of the experts.
    moved = t.routed * (4 * row + 2 * d * 4)
    yield traffic("outputs of free experts", EXPERTS, moved, moved)


def _coupling(shape: Shape, layout: Layout, experts: PlannedExperts) -> Work:
    """The rows of the router by W_g of this rank's experts: a loss on weights."""
    n, d, a = experts.number, shape.hidden, shape.value
    local, f = n // layout.ep, experts.width / layout.etp
    work = planned_product(_COUPLING, SCORING, LINEAR, (local * n, d, f), a, matrices=local)
    w = local * d * f * a
    return replace(work, nbytes=work.nbytes + 2 * w, of_model=False)  # W_g is transposed


def _experts(shape: Shape, layout: Layout, experts: PlannedExperts) -> Iterator[Work]:
    t, d, a = tokens_of(shape, layout), shape.hidden, shape.value
    f, local = experts.width / layout.etp, experts.number // layout.ep
    rows, fp8 = t.received, shape.fp8_experts
    row = d * a

    def of_rows(name: str, k: float, n: float) -> Work:
        sizes = (rows, k, n)
        return planned_product(name, EXPERTS, EXPERT_PRODUCTS, sizes, a, matrices=local, fp8=fp8)

    if layout.etp_ep_group.size > 1:  # rows are copied to be sent, and outputs summed per token
        moved = (t.routed + t.sent * layout.etp) * row
        yield traffic("rows to send", EXPERTS, moved, moved)
        yield traffic("sum of outputs", EXPERTS, moved, moved)
    gathered = 2 * rows * row
    yield traffic("rows by expert", EXPERTS, gathered, gathered)
    norms, r = experts.norms, experts.low_rank
    if r is None:
        yield of_rows("x [W_g | W_p]", d, 2 * f)
    else:
        alone = layout.etp_ep_group.size == 1
        has_c = norms is not None and (norms.sends_c or (alone and norms.passes_on_c))
        if not has_c:
            yield replace(of_rows("C of the rows", d, r), of_model=norms is None)
        up = of_rows("C W_up", r, f)
        again = up.flops if norms is None or norms.recomputes_gate else 0
        yield replace(up, backward_flops=up.backward_flops + again)
        yield of_rows("x W_p", d, f)
    yield traffic("SwiGLU", EXPERTS, 3 * rows * f * a, 5 * rows * f * a)
    yield of_rows("h W_out", f, d)
    yield traffic("outputs to rows", EXPERTS, gathered, gathered)


def _shared(shape: Shape, layout: Layout, shared: SharedExpertSize) -> Iterator[Work]:
    """The shared expert; a plan does not overlap it with the dispatch."""
    t, d, a = tokens_of(shape, layout), shape.hidden, shape.value
    f, row, fp8 = shared.width / layout.tp, t.between * d * a, shape.fp8_linear
    yield planned_product("shared_fc1", SHARED, LINEAR, (t.all, d, 2 * f), a, fp8=fp8)
    yield traffic("shared SwiGLU", SHARED, 3 * t.all * f * a, 5 * t.all * f * a)
    yield planned_product("shared_fc2", SHARED, LINEAR, (t.all, f, d), a, fp8=fp8)
    if shared.gate:
        yield planned_product("gate of the shared expert", SHARED, FP32, (t.between, d, 1), 4)
        yield traffic("y by the gate", SHARED, 2 * row, 4 * row)
    yield traffic("sum with the experts", SHARED, 3 * row, 0)


def is_repeated(work: Work, layout: Layout) -> bool:
    """Whether the backward pass computes it again."""
    if work.name == _COUPLING:  # a pass that is computed again has its loss in the second one
        return False
    if layout.recompute:
        return work.part != HEAD
    place = (work.part, work.name)
    if any(place in _MODULES.get(module, ()) for module in layout.recompute_modules):
        return True
    module = None
    if work.name in (_NORM, "attention"):
        module = recompute.NORM if work.name == _NORM else recompute.CORE_ATTENTION
    elif work.name != _RESIDUAL:
        of_part = {DENSE: recompute.DENSE, SCORING: recompute.EXPERTS, EXPERTS: recompute.EXPERTS}
        module = of_part.get(work.part, layout.shared_module if work.part == SHARED else None)
    return module in layout.recompute_modules


def work_of_head(shape: Shape, layout: Layout) -> list[Work]:
    """The output layer and the loss. Both gradients are computed with the forward pass."""
    t, d, a = tokens_of(shape, layout), shape.hidden, shape.value
    vocabulary = shape.vocabulary / layout.tp
    logits = planned_product("logits", HEAD, LINEAR, (t.all, d, vocabulary), a)
    chunks = -(-t.all // shape.loss_chunk)
    # Each chunk of tokens adds its dw to a sum in fp32.
    summed = chunks * (2 * a + 2 * GRADIENT_BYTES) * d * vocabulary
    return [
        logits,
        traffic("softmax", HEAD, 0, (3 * a if shape.fused_softmax else 24) * t.all * vocabulary),
        traffic("dw of the chunks", HEAD, 0, summed),
    ]


def optimizer_bytes(weights: float, states: float, shape: Shape) -> float:
    """Memory traffic of a rank's update: the gradient's norm, Adam, and zeroing the gradients.

    Args:
        weights: the numbers of weights on the rank.
        states: those that it updates.
    """
    master = MASTER_BYTES if shape.bf16 else 0
    read_and_written = MOMENT_BYTES + (master or shape.value)
    adam = GRADIENT_BYTES + 2 * read_and_written + (shape.value if master else 0)
    return 2 * GRADIENT_BYTES * weights + adam * states


def model_flops_per_token(shape: Shape) -> float:
    """Three times the forward FLOPs of a token, without what is computed twice.

    AoE's products with W_down of all experts count; recomputation does not.
    """
    alone = Layout(ranks=1)
    forward = sum(work.flops for work in work_of_head(shape, alone))
    for is_moe, count in Counter(shape.moe_layers).items():
        of_layer = work_of_layer(shape, alone, is_moe)
        forward += count * sum(work.flops for work in of_layer if work.of_model)
    return 3 * forward / shape.seq_length
