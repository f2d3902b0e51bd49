"""The benches of single operators: permutation, selection, products, attention."""

from __future__ import annotations

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
    Forward,
    Measure,
    Moved,
    Products,
)
from tools.bench.peers import torch_ops, transformer_engine
from tools.bench.sizes import BenchSize

KEPT = "ours, C kept"
HEAD_WIDTH = 64


def permute(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    x_TD = leaf(draw.normal(size.T, size.d, seed=1))
    experts_TK = draw.experts(size)
    row_map = ours.routing_map(experts_TK, size.n)
    token_N = torch_ops.token_of_row(row_map)
    dy_ND = draw.normal(size.rows, size.d, seed=2)

    def contender(name: str, forward: Forward) -> BenchContender:
        return BenchContender(name, forward, {"x": x_TD}, upstream=(dy_ND,))

    forward = x_TD.nbytes + dy_ND.nbytes + row_map.slots_N.nbytes
    backward = dy_ND.nbytes + x_TD.nbytes + row_map.rows_TK.nbytes
    return Bench(
        "permute",
        size,
        draw.dtype,
        [contender(OURS, lambda: [ours.permute(x_TD, row_map)])],
        [
            contender("torch index_select", lambda: [x_TD.index_select(0, token_N)]),
            *transformer_engine.permute_peers(x_TD, experts_TK, size.rows, dy_ND),
        ],
        (Measure(FORWARD, Moved(forward)), Measure(BACKWARD, Moved(backward))),
    )


def unpermute(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    experts_TK = draw.experts(size)
    row_map = ours.routing_map(experts_TK, size.n)
    y_ND = leaf(draw.normal(size.rows, size.d, seed=1))
    probs_TK = leaf(draw.probs(size))
    dout_TD = draw.normal(size.T, size.d, seed=2)

    def contender(name: str, forward: Forward) -> BenchContender:
        return BenchContender(name, forward, {"y": y_ND, "probs": probs_TK}, upstream=(dout_TD,))

    forward = y_ND.nbytes + dout_TD.nbytes + row_map.rows_TK.nbytes + probs_TK.nbytes
    backward = 2 * y_ND.nbytes + dout_TD.nbytes + row_map.rows_TK.nbytes + 2 * probs_TK.nbytes
    return Bench(
        "unpermute",
        size,
        draw.dtype,
        [contender(OURS, lambda: [ours.unpermute(y_ND, row_map, probs_TK)])],
        [
            contender("torch index_add", lambda: [torch_ops.unpermute(y_ND, row_map, probs_TK)]),
            *transformer_engine.unpermute_peers(y_ND, experts_TK, probs_TK, dout_TD),
        ],
        (Measure(FORWARD, Moved(forward)), Measure(BACKWARD, Moved(backward))),
    )


def routing_map(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    experts_TK = draw.experts(size)
    # For each choice, the choice is read, and a row and a choice are written.
    return Bench(
        "routing_map",
        size,
        draw.dtype,
        [
            BenchContender(
                OURS, lambda: ours.routing_map(experts_TK, size.n, num_rows=experts_TK.numel())
            )
        ],
        [BenchContender("torch argsort", lambda: torch_ops.routing_map(experts_TK, size.n))],
        (Measure(FORWARD, Moved(3 * experts_TK.nbytes)),),
    )


def norm_topk(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    """Norms and choices, with the gradient of all norms."""
    w_EDR = leaf(draw.weight(size.n, size.d, size.l, seed=2))
    x_TD = leaf(draw.tokens_with_margin(size, w_EDR.detach()))
    dnorms_TE = draw.normal(size.T, size.n, seed=3).float()

    def contender(name: str, forward: Forward) -> BenchContender:
        return BenchContender(
            name,
            forward,
            {"x": x_TD, "w": w_EDR},
            frozenset({"w"}),
            (dnorms_TE,),
            unordered=frozenset({"output 1"}),
        )

    product = (size.T, size.d, size.n * size.l)
    gradients = ((size.T, size.n * size.l, size.d), (size.d, size.T, size.n * size.l))
    return Bench(
        "norm_topk",
        size,
        draw.dtype,
        [
            contender(OURS, lambda: ours.norm_topk(x_TD, w_EDR, size.K)[:2]),
            contender(KEPT, lambda: ours.norm_topk(x_TD, w_EDR, size.K, keep="all")[:2]),
        ],
        [contender("torch einsum", lambda: torch_ops.norm_topk(x_TD, w_EDR, size.K)[:2])],
        (Measure(FORWARD, Products((product,))), Measure(BACKWARD, Products(gradients))),
    )


def grouped_gemm(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    row_map = ours.routing_map(draw.experts(size), size.n)
    counts_E = row_map.counts_E
    x_NI = leaf(draw.normal(size.rows, size.d, seed=1))
    w_EIO = leaf(draw.weight(size.n, size.d, size.f, seed=2))
    dy_NO = draw.normal(size.rows, size.f, seed=3)

    def contender(name: str, forward: Forward) -> BenchContender:
        return BenchContender(name, forward, {"x": x_NI, "w": w_EIO}, frozenset({"w"}), (dy_NO,))

    def grouped_mm() -> BenchContender | Absent:
        if not hasattr(functional, "grouped_mm"):
            return Absent(torch_ops.GROUPED_MM, f"torch {torch.__version__} has no grouped_mm")
        ends_E = counts_E.cumsum(0).int()
        return contender(
            torch_ops.GROUPED_MM, lambda: [functional.grouped_mm(x_NI, w_EIO, offs=ends_E)]
        )

    rows, inner, columns = size.rows, size.d, size.f
    gradients = ((rows, columns, inner), (inner, rows, columns))
    return Bench(
        "grouped_gemm",
        size,
        draw.dtype,
        [contender(OURS, lambda: [ours.grouped_gemm(x_NI, w_EIO, counts_E)])],
        [
            contender(
                "torch mm each", lambda: [torch_ops.split_and_multiply(x_NI, w_EIO, counts_E)]
            ),
            grouped_mm(),
            *transformer_engine.grouped_gemm_peers(x_NI, w_EIO, row_map, dy_NO),
        ],
        (
            Measure(FORWARD, Products(((rows, inner, columns),))),
            Measure(BACKWARD, Products(gradients)),
        ),
    )


def swiglu(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    gate_NF = leaf(draw.normal(size.rows, size.f, seed=1))
    up_NF = leaf(draw.normal(size.rows, size.f, seed=2))
    probs_N = leaf(draw.probs(size).flatten())
    dh_NF = draw.normal(size.rows, size.f, seed=3)

    def contender(name: str, forward: Forward) -> BenchContender:
        leaves = {"gate": gate_NF, "up": up_NF, "probs": probs_N}
        return BenchContender(name, forward, leaves, upstream=(dh_NF,))

    forward = 3 * gate_NF.nbytes + probs_N.nbytes
    backward = 5 * gate_NF.nbytes + 2 * probs_N.nbytes
    return Bench(
        "swiglu",
        size,
        draw.dtype,
        [contender(OURS, lambda: [ours.swiglu(gate_NF, up_NF, probs_N)])],
        [contender("torch silu", lambda: [torch_ops.swiglu(gate_NF, up_NF, probs_N)])],
        (Measure(FORWARD, Moved(forward)), Measure(BACKWARD, Moved(backward))),
    )


def expert_merge(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    """T mixtures of n matrices (d, f), as Lory merges experts per segment."""
    w_EIO = leaf(draw.weight(size.n, size.d, size.f, seed=1))
    weights_PE = leaf(draw.normal(size.T, size.n, seed=2, dtype=torch.float32).softmax(-1))
    dmerged_PIO = draw.normal(size.T, size.d, size.f, seed=3)

    def composed() -> list[Tensor]:
        merged_PM = weights_PE.to(w_EIO.dtype) @ w_EIO.flatten(1)
        return [merged_PM.unflatten(1, w_EIO.shape[1:])]

    def contender(name: str, forward: Forward) -> BenchContender:
        leaves = {"weights": weights_PE, "w": w_EIO}
        return BenchContender(name, forward, leaves, frozenset({"w"}), (dmerged_PIO,))

    forward = w_EIO.nbytes + dmerged_PIO.nbytes + weights_PE.nbytes
    backward = 2 * w_EIO.nbytes + dmerged_PIO.nbytes + 2 * weights_PE.nbytes
    return Bench(
        "expert_merge",
        size,
        draw.dtype,
        [contender(OURS, lambda: [ours.expert_merge(weights_PE, w_EIO)])],
        [contender("torch mm", composed)],
        (Measure(FORWARD, Moved(forward)), Measure(BACKWARD, Moved(backward))),
    )


def attention(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    """T tokens of one sequence, d / 64 heads, half as many of keys."""
    heads = max(size.d // HEAD_WIDTH, 2)
    width, scale = size.d // heads, (size.d // heads) ** -0.5
    q_SBHC = leaf(draw.normal(size.T, 1, heads, width, seed=1))
    k_SBGC = leaf(draw.normal(size.T, 1, heads // 2, width, seed=2))
    v_SBGC = leaf(draw.normal(size.T, 1, heads // 2, width, seed=3))
    dout_SBHC = draw.normal(size.T, 1, heads, width, seed=4)

    def contender(name: str, forward: Forward) -> BenchContender:
        leaves = {"q": q_SBHC, "k": k_SBGC, "v": v_SBGC}
        return BenchContender(name, forward, leaves, upstream=(dout_SBHC,))

    def sdpa() -> list[Tensor]:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHC, k_SBGC, v_SBGC))
        y_BHSC = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        return [y_BHSC.permute(2, 0, 1, 3)]

    # Pairs of tokens below the diagonal count, as one product of half of T.
    half = size.T // 2
    scores, sums = (size.T, width, half), (size.T, half, width)
    return Bench(
        "attention",
        size,
        draw.dtype,
        [contender(OURS, lambda: [ours.attention(q_SBHC, k_SBGC, v_SBGC, scale)])],
        [contender("torch sdpa", sdpa)],
        (
            Measure(FORWARD, Products((scores, sums) * heads)),
            Measure(BACKWARD, Products((scores, scores, sums, sums, sums) * heads)),
        ),
    )
