"""Benches of routing_map, which sorts the choices, and norm_topk, which makes them (AoE)."""

from __future__ import annotations

from moe_parallel.ops import Ops
from tools.bench.contender import (
    BACKWARD,
    FORWARD,
    OURS,
    Bench,
    BenchContender,
    Forward,
    Measure,
    Moved,
    Products,
)
from tools.bench.inputs import Draw, leaf
from tools.bench.peers import torch_ops
from tools.bench.sizes import BenchSize

KEPT = "ours, C kept"


def routing_map(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    experts_TK = draw.experts(size)
    # For each choice, the choice is read, and a row and a choice are written.
    return Bench(
        "routing_map",
        size,
        draw.dtype,
        [BenchContender(OURS, lambda: ours.routing_map(experts_TK, size.n, all_chosen=True))],
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
