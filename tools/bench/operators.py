"""The benches of single operators: permutation, selection, products, attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from moe_parallel.ops import Ops
from tools.bench.inputs import Draw, leaf
from tools.bench.measurement import (
    BACKWARD,
    FORWARD,
    OURS,
    Absent,
    Bench,
    BenchContender,
    Measure,
    Moved,
    Products,
)
from tools.bench.peers import torch_ops, transformer_engine
from tools.bench.sizes import BenchSize

KEPT = "ours, C kept"
HEAD_WIDTH = 64


def _bench(
    op: str,
    size: BenchSize,
    draw: Draw,
    ours: Sequence[BenchContender],
    peers: Sequence[BenchContender | Absent],
    forward: Moved | Products,
    backward: Moved | Products | None = None,
) -> Bench:
    """`forward`, `backward`: the work of each pass that is timed."""
    passes = ((FORWARD, forward), (BACKWARD, backward))
    measures = tuple(Measure(timed, work) for timed, work in passes if work is not None)
    return Bench(op, size, draw.dtype, ours, peers, measures)


def permute(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    x_TD = leaf(draw.normal(size.T, size.d, seed=1))
    experts_TK = draw.experts(size)
    row_map = ours.routing_map(experts_TK, size.n)
    token_N = torch_ops.token_of_row(row_map)
    dy_ND = draw.normal(size.rows, size.d, seed=2)
    contender = partial(BenchContender, leaves={"x": x_TD}, upstream=(dy_ND,))
    peers = [
        contender("torch index_select", lambda: [x_TD.index_select(0, token_N)]),
        *transformer_engine.permute_peers(x_TD, experts_TK, size.rows, dy_ND),
    ]
    forward = x_TD.nbytes + dy_ND.nbytes + row_map.slots_N.nbytes
    backward = dy_ND.nbytes + x_TD.nbytes + row_map.rows_TK.nbytes
    own = [contender(OURS, lambda: [ours.permute(x_TD, row_map)])]
    return _bench("permute", size, draw, own, peers, Moved(forward), Moved(backward))


def unpermute(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    experts_TK = draw.experts(size)
    row_map = ours.routing_map(experts_TK, size.n)
    y_ND = leaf(draw.normal(size.rows, size.d, seed=1))
    probs_TK = leaf(draw.probs(size))
    dout_TD = draw.normal(size.T, size.d, seed=2)
    leaves = {"y": y_ND, "probs": probs_TK}
    contender = partial(BenchContender, leaves=leaves, upstream=(dout_TD,))
    peers = [
        contender("torch index_add", lambda: [torch_ops.unpermute(y_ND, row_map, probs_TK)]),
        *transformer_engine.unpermute_peers(y_ND, experts_TK, probs_TK, dout_TD),
    ]
    forward = y_ND.nbytes + dout_TD.nbytes + row_map.rows_TK.nbytes + probs_TK.nbytes
    backward = 2 * y_ND.nbytes + dout_TD.nbytes + row_map.rows_TK.nbytes + 2 * probs_TK.nbytes
    own = [contender(OURS, lambda: [ours.unpermute(y_ND, row_map, probs_TK)])]
    return _bench("unpermute", size, draw, own, peers, Moved(forward), Moved(backward))


def routing_map(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    experts_TK = draw.experts(size)
    own = BenchContender(
        OURS, lambda: ours.routing_map(experts_TK, size.n, num_rows=experts_TK.numel())
    )
    peer = BenchContender("torch argsort", lambda: torch_ops.routing_map(experts_TK, size.n))
    # For each choice, the choice is read, and a row and a choice are written.
    return _bench("routing_map", size, draw, [own], [peer], Moved(3 * experts_TK.nbytes))


def norm_topk(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    """Norms and choices, with the gradient of all norms."""
    w_EDR = leaf(draw.weight(size.n, size.d, size.l, seed=2))
    x_TD = leaf(draw.tokens_with_margin(size, w_EDR.detach()))
    dnorms_TE = draw.normal(size.T, size.n, seed=3).float()
    contender = partial(
        BenchContender,
        leaves={"x": x_TD, "w": w_EDR},
        weights=frozenset({"w"}),
        upstream=(dnorms_TE,),
        unordered=frozenset({"output 1"}),
    )
    product = (size.T, size.d, size.n * size.l)
    gradients = ((size.T, size.n * size.l, size.d), (size.d, size.T, size.n * size.l))
    own = [
        contender(OURS, lambda: ours.norm_topk(x_TD, w_EDR, size.K)[:2]),
        contender(KEPT, lambda: ours.norm_topk(x_TD, w_EDR, size.K, keep="all")[:2]),
    ]
    peers = [contender("torch einsum", lambda: torch_ops.norm_topk(x_TD, w_EDR, size.K)[:2])]
    return _bench("norm_topk", size, draw, own, peers, Products((product,)), Products(gradients))


def grouped_gemm(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    row_map = ours.routing_map(draw.experts(size), size.n)
    counts_E = row_map.counts_E
    x_NI = leaf(draw.normal(size.rows, size.d, seed=1))
    w_EIO = leaf(draw.weight(size.n, size.d, size.f, seed=2))
    dy_NO = draw.normal(size.rows, size.f, seed=3)
    contender = partial(
        BenchContender, leaves={"x": x_NI, "w": w_EIO}, weights=frozenset({"w"}), upstream=(dy_NO,)
    )

    def grouped_mm() -> BenchContender | Absent:
        name = torch_ops.GROUPED_MM
        if not hasattr(functional, "grouped_mm"):
            return Absent(name, f"torch {torch.__version__} has no grouped_mm")
        ends_E = counts_E.cumsum(0).int()
        return contender(name, lambda: [functional.grouped_mm(x_NI, w_EIO, offs=ends_E)])

    peers = [
        contender("torch mm each", lambda: [torch_ops.split_and_multiply(x_NI, w_EIO, counts_E)]),
        grouped_mm(),
        *transformer_engine.grouped_gemm_peers(x_NI, w_EIO, row_map, dy_NO),
    ]
    rows, inner, columns = size.rows, size.d, size.f
    forward = Products(((rows, inner, columns),))
    backward = Products(((rows, columns, inner), (inner, rows, columns)))
    own = [contender(OURS, lambda: [ours.grouped_gemm(x_NI, w_EIO, counts_E)])]
    return _bench("grouped_gemm", size, draw, own, peers, forward, backward)


def swiglu(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    gate_NF = leaf(draw.normal(size.rows, size.f, seed=1))
    up_NF = leaf(draw.normal(size.rows, size.f, seed=2))
    probs_N = leaf(draw.probs(size).flatten())
    dh_NF = draw.normal(size.rows, size.f, seed=3)
    leaves = {"gate": gate_NF, "up": up_NF, "probs": probs_N}
    contender = partial(BenchContender, leaves=leaves, upstream=(dh_NF,))
    forward = 3 * gate_NF.nbytes + probs_N.nbytes
    backward = 5 * gate_NF.nbytes + 2 * probs_N.nbytes
    own = [contender(OURS, lambda: [ours.swiglu(gate_NF, up_NF, probs_N)])]
    peers = [contender("torch silu", lambda: [torch_ops.swiglu(gate_NF, up_NF, probs_N)])]
    return _bench("swiglu", size, draw, own, peers, Moved(forward), Moved(backward))


def expert_merge(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    """T mixtures of n matrices (d, f), as Lory merges experts per segment."""
    w_EIO = leaf(draw.weight(size.n, size.d, size.f, seed=1))
    weights_PE = leaf(draw.normal(size.T, size.n, seed=2, dtype=torch.float32).softmax(-1))
    dmerged_PIO = draw.normal(size.T, size.d, size.f, seed=3)
    contender = partial(
        BenchContender,
        leaves={"weights": weights_PE, "w": w_EIO},
        weights=frozenset({"w"}),
        upstream=(dmerged_PIO,),
    )

    def composed() -> list[Tensor]:
        merged_PM = weights_PE.to(w_EIO.dtype) @ w_EIO.flatten(1)
        return [merged_PM.unflatten(1, w_EIO.shape[1:])]

    forward = w_EIO.nbytes + dmerged_PIO.nbytes + weights_PE.nbytes
    backward = 2 * w_EIO.nbytes + dmerged_PIO.nbytes + 2 * weights_PE.nbytes
    own = [contender(OURS, lambda: [ours.expert_merge(weights_PE, w_EIO)])]
    peers = [contender("torch mm", composed)]
    return _bench("expert_merge", size, draw, own, peers, Moved(forward), Moved(backward))


def attention(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    """T tokens of one sequence, d / 64 heads, half as many of keys."""
    heads = max(size.d // HEAD_WIDTH, 2)
    width, scale = size.d // heads, (size.d // heads) ** -0.5
    q_SBHC = leaf(draw.normal(size.T, 1, heads, width, seed=1))
    k_SBGC = leaf(draw.normal(size.T, 1, heads // 2, width, seed=2))
    v_SBGC = leaf(draw.normal(size.T, 1, heads // 2, width, seed=3))
    dout_SBHC = draw.normal(size.T, 1, heads, width, seed=4)
    leaves = {"q": q_SBHC, "k": k_SBGC, "v": v_SBGC}
    contender = partial(BenchContender, leaves=leaves, upstream=(dout_SBHC,))

    def sdpa() -> list[Tensor]:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHC, k_SBGC, v_SBGC))
        y_BHSC = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        return [y_BHSC.permute(2, 0, 1, 3)]

    # Pairs of tokens below the diagonal count, as one product of half of T.
    half = size.T // 2
    scores, sums = (size.T, width, half), (size.T, half, width)
    forward = Products((scores, sums) * heads)
    backward = Products((scores, scores, sums, sums, sums) * heads)
    own = [contender(OURS, lambda: [ours.attention(q_SBHC, k_SBGC, v_SBGC, scale)])]
    peers = [contender("torch sdpa", sdpa)]
    return _bench("attention", size, draw, own, peers, forward, backward)
