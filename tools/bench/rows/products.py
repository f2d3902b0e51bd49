"""Benches of products and of what is between two products: grouped GEMM, SwiGLU, merged experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moe_parallel.ops import Ops
from tools.bench.contender import (
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
from tools.bench.inputs import Draw, leaf
from tools.bench.peers import torch_ops, transformer_engine
from tools.bench.sizes import BenchSize


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
