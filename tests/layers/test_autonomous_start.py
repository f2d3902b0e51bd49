"""AoE's norms before training, and their cost: closed forms of the layer's sizes."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_parallel.config import ModelConfig, aoe_wide_size
from moe_parallel.ops import reference
from moe_parallel.systems import AoESelection, TopKSelection
from moe_parallel.telemetry.statistics import ent_conf_sum
from tests.layers.single import EXPERTS, WIDTH, Case, build, values


@pytest.mark.parametrize(
    ("rank", "mean"),
    [(64, 4.4), (128, 6.3), (256, 8.9), (512, 12.5)],  # 0.02 sqrt(768 rank)
)
def test_norms_of_normalized_tokens(rank, mean):
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(512, 768, generator=generator)
    x_TD /= x_TD.square().mean(dim=1, keepdim=True).sqrt()  # with the RMS that RMSNorm gives
    std = ModelConfig().init_method_std
    w_down_EDR = torch.randn(8, 768, rank, generator=generator) * std
    norms_TE, *_ = reference.norm_topk(x_TD, w_down_EDR, 2)
    assert norms_TE.mean().item() == pytest.approx(mean, abs=0.06)
    # They differ by tenths, so no expert is clearly ahead: the ceiling is ln 8 = 2.079.
    assert norms_TE.std(dim=1).mean().item() == pytest.approx(0.37, abs=0.04)
    assert ent_conf_sum(norms_TE).item() / 512 == pytest.approx(2.015, abs=0.02)


def _forward_flops(case: Case) -> int:
    given = values(case)
    layer = build(case, given, torch.float64, "reference").eval()
    with FlopCounterMode(display=False) as counter:
        layer(torch.from_numpy(given["x"]))
    return counter.get_total_flops()


def test_flops_of_a_layer():
    tokens, k, d, rank, width = 7, 2, WIDTH, 2, 3
    routed = _forward_flops(Case(TopKSelection(moe_router_topk=k), tokens=tokens))
    assert routed == 2 * tokens * d * EXPERTS + 6 * tokens * k * d * width
    autonomous = _forward_flops(
        Case(AoESelection(moe_router_topk=k, aoe_low_rank_size=rank), tokens=tokens)
    )
    scores = 2 * tokens * EXPERTS * d * rank
    # C of the chosen experts is not computed again: the selection passes it on.
    assert autonomous == scores + 2 * tokens * k * (rank * width + 2 * d * width)


def test_the_width_of_eq_5_costs_what_the_unchosen_score():
    """Forward FLOPs of AoE's formula = MoE's + 2 T (n - K) d d_low, up to rounding the width."""
    n, k, d, d_ffn = 8, 2, 768, 3072
    for rank, ratio in ((64, 1.021), (128, 1.042), (256, 1.083), (512, 1.167)):
        wide = aoe_wide_size(d, d_ffn, rank)
        moe = k * 3 * d * d_ffn
        aoe = n * d * rank + k * (rank * wide + 2 * d * wide)
        assert aoe - moe == pytest.approx((n - k) * d * rank, abs=k * (rank + 2 * d))
        assert math.isclose(aoe / moe, ratio, abs_tol=1e-3)
