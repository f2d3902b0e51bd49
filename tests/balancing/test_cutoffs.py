"""The cutoffs of expert threshold routing: where they start, and how they move."""

import math

import pytest
import torch
from torch import distributed as dist

from moe_parallel.balancing.bias import AnchoredBias
from moe_parallel.balancing.controller import LossCoefficient
from moe_parallel.balancing.load import exceeded_by_share
from moe_parallel.config import make_config
from moe_parallel.parallel import groups_of_one
from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems.threshold import exceeded_norm, exceeded_normal
from moe_parallel.systems.threshold.rule import (
    ExpertCutoffs,
    QuantileCutoffs,
    SignCutoffs,
)
from tests.distributed import run_distributed

ALONE = groups_of_one().tp_dp_cp


def step(cutoffs: ExpertCutoffs, *micro_batches: torch.Tensor) -> list[float]:
    """One step of these scores [T, E] on one rank; returns the cutoffs after it."""
    counts_E = torch.zeros(len(cutoffs.bias_E), dtype=torch.float64)
    for scores_TE in micro_batches:
        cutoffs.observe(scores_TE, 0, Tokens(1))
        counts_E += (scores_TE > cutoffs.cutoff_E).sum(dim=0)
    cutoffs.update(counts_E, ALONE)
    return cutoffs.cutoff_E.tolist()


def column(*scores: float) -> torch.Tensor:
    """Scores for a model of two experts, the second of which has the opposite ones."""
    return torch.tensor([[score, -score] for score in scores])


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "above"),
    [(5, 4, 1.0, 1), (5, 4, 1.5, 1), (5, 4, 3.9, 4), (5, 4, 0.1, 1), (100, 10, 2.3, 23)],
)
def test_a_share_is_rounded_down_to_at_least_one_token_and_not_all(
    tokens: int, experts: int, k: float, above: int
) -> None:
    scores_AE = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))
    exceeded_E = exceeded_by_share(scores_AE, k)
    assert (scores_AE > exceeded_E).sum(dim=0).tolist() == [above] * experts


def test_the_start_does_not_count_in_the_running_mean() -> None:
    """Quantiles 4, then 8, with beta 1/2: raw 2, then 5; divided by 1/2 and 3/4: 4, then 6.667."""
    cutoffs = QuantileCutoffs(2, start=100.0, mean_choices=1, ema=0.5)
    assert cutoffs.cutoff_E.tolist() == [100.0, 100.0]
    assert step(cutoffs, column(3.0, 5.0)) == [4.0, -4.0]
    assert step(cutoffs, column(7.0, 9.0)) == pytest.approx([20 / 3, -20 / 3])
    assert cutoffs.weight_1.tolist() == [0.75]


def test_a_step_takes_the_mean_over_its_micro_batches_and_does_not_pool_them() -> None:
    cutoffs = QuantileCutoffs(4, start=0.0, mean_choices=1, ema=0.9)
    # {0, 1, 2, 3}: 2.5, and {10, 11, 12, 13}: 12.5. The pooled scores would give 11.5.
    micro_batches = [(first + torch.arange(4.0))[:, None].expand(4, 4) for first in (0.0, 10.0)]
    assert step(cutoffs, *micro_batches) == pytest.approx([7.5] * 4)


def test_the_sign_moves_a_cutoff_by_the_rate_toward_the_load() -> None:
    cutoffs = SignCutoffs(2, start=0.0, mean_choices=1, rate=0.25)
    # Of 4 tokens an expert is to compute 2: the first computes 3, the second 1.
    assert step(cutoffs, column(1.0, 2.0, 3.0, -1.0)) == [0.25, -0.25]
    assert step(cutoffs, column(1.0, 2.0, -3.0, -1.0)) == [0.25, -0.25]
    assert cutoffs.tokens_1.tolist() == [0.0]


def test_the_share_of_a_fractional_k_is_exact() -> None:
    """23 of 100 tokens are 2.3 of 10 experts, though 2.3 * 100 < 230 in floating point."""
    even_E = torch.full((10,), 23.0, dtype=torch.float64)
    cutoffs = SignCutoffs(10, start=0.0, mean_choices=2.3, rate=0.25)
    cutoffs.tokens_1 += 100
    anchored = AnchoredBias(10, 0.25, num_free=1, k=4, k_e=2.3)
    for state, counts_E in ((cutoffs, even_E), (anchored, torch.cat([even_E, even_E[:1] + 147]))):
        state.update(counts_E, ALONE)
        assert not state.bias_E.any()
    coefficient = LossCoefficient(1.0, target=2.3, factor=2.0)
    coefficient.move(torch.tensor([230.0, 100.0], dtype=torch.float64))
    assert coefficient.setting == 1


def test_a_step_without_tokens_leaves_the_cutoffs() -> None:
    for cutoffs in (QuantileCutoffs(2, 0.5, 1, ema=0.9), SignCutoffs(2, 0.5, 1, rate=0.1)):
        before = {name: value.clone() for name, value in cutoffs.state_dict().items()}
        assert step(cutoffs) == [0.5, 0.5]
        assert all(torch.equal(before[name], now) for name, now in cutoffs.state_dict().items())


def test_the_state_goes_on_bit_for_bit_also_in_bf16_models() -> None:
    micro_batches = torch.randn(3, 16, 4, generator=torch.Generator().manual_seed(1))
    straight = QuantileCutoffs(4, 0.0, 2, ema=0.9).bfloat16()
    halves = [QuantileCutoffs(4, 0.0, 2, ema=0.9).bfloat16() for _ in range(2)]
    assert list(straight.state_dict()) == ["bias_E", "weight_1"]
    step(straight, micro_batches[0])
    step(halves[0], micro_batches[0])
    halves[1].load_state_dict(halves[0].state_dict())
    for scores_TE in micro_batches[1:]:
        assert step(straight, scores_TE) == step(halves[1], scores_TE)
    assert straight.bias_E.dtype == straight.weight_1.dtype == torch.float32


def _by_ranks() -> list[float]:
    """The cutoffs after two steps of four micro-batches, which the ranks take in turn."""
    micro_batches = torch.randn(2, 4, 16, 6, generator=torch.Generator().manual_seed(3))
    cutoffs = QuantileCutoffs(6, 0.0, 2, ema=0.9)
    for of_step in micro_batches:
        for scores_TE in of_step[dist.get_rank() :: dist.get_world_size()]:
            cutoffs.observe(scores_TE, 0, Tokens(1))
        cutoffs.update(torch.zeros(6, dtype=torch.float64), dist.group.WORLD)
    return cutoffs.cutoff_E.tolist()


def test_ranks_agree_on_the_cutoffs() -> None:
    (alone,) = run_distributed(1, _by_ranks)
    for found in run_distributed(2, _by_ranks):
        assert found == pytest.approx(alone, abs=1e-6)


def _signs_of_ranks() -> list[float]:
    """Of the 8 tokens of two ranks, an expert is to compute 4; they compute 5 and 3."""
    cutoffs = SignCutoffs(2, start=0.0, mean_choices=1, rate=0.25)
    cutoffs.observe(torch.zeros(4, 2), 0, Tokens(1))
    cutoffs.update(torch.tensor([5.0, 3.0], dtype=torch.float64), dist.group.WORLD)
    return cutoffs.cutoff_E.tolist()


def test_the_sign_compares_with_the_tokens_of_all_ranks() -> None:
    assert run_distributed(2, _signs_of_ranks) == [[0.25, -0.25]] * 2


def test_the_start_is_the_quantile_of_initial_scores() -> None:
    """Width 256, standard deviation 0.02, a quarter of the tokens: 0.216, and 1.41 at rank 16."""
    assert exceeded_normal(0.25, 0.02 * 16) == pytest.approx(0.2158, abs=1e-4)
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 16, 64):
        norms = torch.randn(200_000, size, generator=generator).norm(dim=1) * 0.32
        for share in (0.125, 0.25, 0.5):
            exact = norms.quantile(1 - share).item()
            assert exceeded_norm(share, 0.32, size) == pytest.approx(exact, rel=0.02), (size, share)
    assert exceeded_norm(0.25, 0.32, 16) == pytest.approx(1.41, abs=0.005)
    assert math.isfinite(exceeded_normal(1.0, 1.0)) and exceeded_norm(1 - 1e-12, 1.0, 1) >= 0


def test_the_time_constant_is_a_share_of_the_run() -> None:
    def ema(train_iters: int, **options: float) -> float:
        selection = make_config({"expert_selection": "threshold", **options}).selection
        return selection.ema(train_iters)

    assert ema(10) == ema(200) == 0.9
    assert ema(20_000) == pytest.approx(0.999)  # the paper's
    assert ema(20_000, moe_threshold_ema=0.5) == 0.5
