"""The loads of a step, the balancing bias, and each way to update it."""

import numpy
import pytest
import torch
from torch import distributed as dist

from moe_parallel.balancing.bias import (
    ExpertBias,
    IntegralDerivativeBias,
    ProportionalBias,
    QuantileBias,
)
from moe_parallel.balancing.load import StepLoad, midpoint
from moe_parallel.parallel import groups_of_one
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from tests.distributed import run_distributed

EXPERTS = 4


def choices_of(experts: list[list[int]]) -> Choices:
    experts_TK = torch.tensor(experts)
    scores_TE = torch.zeros(len(experts), EXPERTS)
    return Choices(experts_TK, torch.ones(experts_TK.shape), scores_TE, scores_TE)


def _steps(micro_batches_of_steps):
    """`share_E` after each step; the ranks take the micro-batches in turn."""
    load = StepLoad(EXPERTS)
    shares = []
    for micro_batches in micro_batches_of_steps:
        for experts in micro_batches[dist.get_rank() :: dist.get_world_size()]:
            load.count(choices_of(experts))
        load.finish(dist.group.WORLD)
        shares.append(load.share_E.tolist())
    return shares


def test_a_step_counts_all_its_micro_batches_and_ranks():
    steps = [
        [[[0, 1], [0, 2]], [[0, -1]], [[0, 3], [3, -1], [-1, -1]]],
        [[[1, 2]], [[1, 3]]],
    ]
    wanted = [[4 / 6, 1 / 6, 1 / 6, 2 / 6], [0, 1, 0.5, 0.5]]
    for world in (1, 2):
        for shares in run_distributed(world, _steps, steps):
            numpy.testing.assert_allclose(shares, wanted, rtol=1e-6)


def test_counts_start_at_zero_and_are_not_saved():
    load = StepLoad(EXPERTS)
    assert load.share_E.tolist() == [0.0] * EXPERTS
    load.count(choices_of([[0, 1]]))
    assert load.counts.tolist() == [1, 1, 0, 0, 1]
    assert list(load.state_dict()) == ["share_E"]


ALONE = groups_of_one().tp_dp_cp


def counts_of(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.float64)


def test_a_step_moves_the_bias_by_exactly_the_rate():
    bias = ExpertBias(EXPERTS, update_rate=0.25)
    bias.update(counts_of(9, 1, 5, 5), ALONE)  # mean 5: one load above it, one below, two equal
    assert bias.bias_E.tolist() == [-0.25, 0.25, 0.0, 0.0]
    bias.update(counts_of(9, 1, 4, 6), ALONE)
    assert bias.bias_E.tolist() == [-0.5, 0.5, 0.25, -0.25]


def test_one_choice_more_or_less_moves_the_bias():
    counts = [2**40] * 8
    counts[0] += 1
    bias = ExpertBias(8, update_rate=1.0)
    bias.update(counts_of(*counts), ALONE)
    assert bias.bias_E.tolist() == [-1.75] + [0.25] * 7  # -1 and 1, less the mean of 3/4


def _biases_of_even_loads(experts, tokens_of_steps):
    """The bias after steps in which each token chooses the next two experts in turn.

    The ranks route unequal shares of the tokens.
    """
    load, bias = StepLoad(experts), ExpertBias(experts, update_rate=0.1)
    for tokens in tokens_of_steps:
        share = tokens // 3
        mine = range(share) if dist.get_rank() == 0 else range(share, tokens)
        if dist.get_world_size() == 1:
            mine = range(tokens)
        chosen = [[2 * token % experts, (2 * token + 1) % experts] for token in mine]
        experts_TK = torch.tensor(chosen)
        scores_TE = torch.zeros(len(chosen), experts)
        load.count(Choices(experts_TK, torch.ones(experts_TK.shape), scores_TE, scores_TE))
        bias.update(load.finish(dist.group.WORLD), dist.group.WORLD)
    return bias.bias_E.tolist(), load.share_E.tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_even_loads_of_all_ranks_leave_the_bias(world):
    experts = 10  # 0.2 of the tokens choose each; in fp32 the mean of ten 0.2 is not 0.2
    for bias, shares in run_distributed(world, _biases_of_even_loads, experts, [5, 10, 35]):
        assert bias == [0.0] * experts
        assert shares == pytest.approx([0.2] * experts)


def test_bf16_models_keep_fp32_biases_and_loads():
    """In bf16 a bias of 1 would not change in a step of 0.001."""
    bias, load = ExpertBias(EXPERTS, 1e-3), StepLoad(EXPERTS)
    bias.bias_E.copy_(torch.tensor([1.0, -1.0, 1.0, -1.0]))
    before = bias.bias_E
    model = torch.nn.ModuleList([bias, load, torch.nn.Linear(2, 2)]).bfloat16()
    assert model[2].weight.dtype == torch.bfloat16
    assert bias.bias_E.dtype == load.share_E.dtype == torch.float32
    assert load.counts.dtype == torch.float64
    assert bias.bias_E is before  # rules keep a reference to it
    bias.update(counts_of(0, 1, 1, 0), ALONE)
    torch.testing.assert_close(bias.bias_E, torch.tensor([1.001, -1.001, 0.999, -0.999]))


def values(bias: ExpertBias) -> list[float]:
    return pytest.approx(bias.bias_E.tolist(), abs=1e-7)


def test_an_error_moves_the_bias_in_proportion():
    bias = ProportionalBias(2, update_rate=0.1)
    bias.update(counts_of(6, 2), ALONE)  # mean 4: errors of -1/2 and 1/2
    assert values(bias) == [-0.05, 0.05]
    bias.update(counts_of(4, 4), ALONE)
    assert values(bias) == [-0.05, 0.05]


def test_the_growth_of_an_error_counts_only_if_it_grows():
    # (error before, error now, the move): the second expert is the first with the other sign.
    for before, now, move in [(0.2, 0.1, 0.1), (0.2, 0.3, 0.4), (0.0, 0.3, 0.3), (-0.2, 0.1, 0.1)]:
        bias = IntegralDerivativeBias(2, update_rate=1.0)
        bias.error_E.copy_(torch.tensor([before, -before]))
        bias.update(counts_of(1000 - 1000 * now, 1000 + 1000 * now), ALONE)
        assert values(bias) == [move, -move], (before, now)
        assert bias.error_E.tolist() == pytest.approx([now, -now])


def load_of(ranked_TE: torch.Tensor, bias: ExpertBias, k: int) -> list[int]:
    chosen = (ranked_TE + bias.bias_E).topk(k, dim=1).indices
    return torch.bincount(chosen.flatten(), minlength=ranked_TE.shape[1]).tolist()


def solve(bias: QuantileBias, *micro_batches: torch.Tensor, k: int) -> None:
    for ranked_TE in micro_batches:
        bias.observe(ranked_TE, k, Tokens(1))
    bias.update(counts_of(*[0] * len(bias.bias_E)), ALONE)


def test_a_quantile_bias_by_hand():
    """Thresholds of the tokens: .5 .5 .5 .55. Margins of expert 0: .4 .3 .2 .05, of 1 the opposite.

    Two tokens are to exceed the quantile, which is halfway between .3 and .2.
    """
    ranked_TE = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.5]])
    bias = QuantileBias(2, ema=0.0)
    solve(bias, ranked_TE, k=1)
    assert values(bias) == [-0.25, 0.25]
    assert load_of(ranked_TE, bias, 1) == [2, 2]
    solve(bias, ranked_TE, k=1)
    assert load_of(ranked_TE, bias, 1) == [2, 2]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_share_of_the_tokens_exceeds_the_price_of_each_expert(k):
    """What one coordinate step solves exactly, before the mean is subtracted."""
    ranked_TE = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).double()
    bias = QuantileBias(8, ema=0.0)
    solved_E = bias._solve(ranked_TE, k)
    margins_TE = ranked_TE - midpoint(ranked_TE, k, dim=1)
    assert (margins_TE > -solved_E).sum(dim=0).tolist() == [64 * k // 8] * 8


def test_it_balances_what_starts_far_from_balance():
    generator = torch.Generator().manual_seed(0)
    offsets_E = torch.linspace(-2, 2, 8)
    ranked_TE = torch.sigmoid(torch.randn(512, 8, generator=generator) + offsets_E)
    bias = QuantileBias(8, ema=0.0)
    before = load_of(ranked_TE, bias, 2)
    for _ in range(4):
        solve(bias, ranked_TE, k=2)
    after = load_of(ranked_TE, bias, 2)
    assert max(before) > 3 * 128
    assert max(after) < 1.15 * 128 < 128 + min(after)
    assert values(bias) != [0.0] * 8
    assert bias.bias_E.sum().item() == pytest.approx(0, abs=1e-6)


def test_the_bias_is_the_mean_over_micro_batches_and_keeps_a_share():
    one = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.5]])
    bias = QuantileBias(2, ema=0.5)
    bias.bias_E.copy_(torch.tensor([-1.0, 1.0]))
    alone = QuantileBias(2, ema=0.0)
    alone.bias_E.copy_(bias.bias_E)
    expected = [alone._solve(each.double(), 1) for each in (one, one.flip(1))]
    mean_E = (expected[0] + expected[1]) / 2
    mean_E = mean_E - mean_E.mean()
    solve(bias, one, one.flip(1), k=1)
    assert values(bias) == (0.5 * mean_E + torch.tensor([-0.5, 0.5])).tolist()


def _solved_by_ranks(k):
    """The bias after a step of four micro-batches, which the ranks take in turn."""
    generator = torch.Generator().manual_seed(3)
    micro_batches = torch.rand(4, 16, 6, generator=generator)
    bias = QuantileBias(6, ema=0.0)
    for ranked_TE in micro_batches[dist.get_rank() :: dist.get_world_size()]:
        bias.observe(ranked_TE, k, Tokens(1))
    bias.update(counts_of(*[0] * 6), dist.group.WORLD)
    return bias.bias_E.tolist()


def test_ranks_agree_on_the_quantiles():
    (alone,) = run_distributed(1, _solved_by_ranks, 2)
    for found in run_distributed(2, _solved_by_ranks, 2):
        assert found == pytest.approx(alone, abs=1e-7)
