"""The bench of causal attention: T tokens of one sequence, d / 64 heads, half as many of keys."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from moe_parallel.ops import Ops
from tools.bench.contender import (
    BACKWARD,
    FORWARD,
    OURS,
    Bench,
    BenchContender,
    Forward,
    Measure,
    Products,
)
from tools.bench.inputs import Draw, leaf
from tools.bench.sizes import BenchSize

HEAD_WIDTH = 64


def attention(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
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
