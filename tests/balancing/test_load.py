"""The loads of a step, and the balancing bias that is updated from them."""

import numpy
import pytest
import torch
from torch import distributed as dist

from moe_parallel.balancing.load import ExpertBias, StepLoad
from moe_parallel.selection.choices import Choices
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


def test_many_tokens_are_counted_exactly():
    load = StepLoad(EXPERTS)
    load.counts[:] = 2.0**24  # here fp32 could no longer count
    load.count(choices_of([[0], [0], [1]]))
    assert (load.counts - 2**24).tolist() == [2, 1, 0, 0, 3]


def counts_of(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.float64)


def test_a_step_moves_the_bias_by_exactly_the_rate():
    bias = ExpertBias(EXPERTS, update_rate=0.25)
    bias.update(counts_of(9, 1, 5, 5))  # mean 5: one load above it, one below, two equal
    assert bias.bias_E.tolist() == [-0.25, 0.25, 0.0, 0.0]
    bias.update(counts_of(9, 1, 4, 6))
    assert bias.bias_E.tolist() == [-0.5, 0.5, 0.25, -0.25]


@pytest.mark.parametrize("experts", [3, 5, 6, 7, 8, 12, 60, 64])
def test_an_even_load_leaves_the_bias(experts):
    """The number of tokens does not matter."""
    for each in (1, 2, 3, 341, 2**24 + 1):
        bias = ExpertBias(experts, update_rate=0.1)
        bias.update(counts_of(*[each] * experts))
        assert bias.bias_E.tolist() == [0.0] * experts


def test_one_choice_more_or_less_moves_the_bias():
    counts = [2**40] * 8
    counts[0] += 1
    bias = ExpertBias(8, update_rate=1.0)
    bias.update(counts_of(*counts))
    assert bias.bias_E.tolist() == [-1.0] + [1.0] * 7


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
        bias.update(load.finish(dist.group.WORLD))
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
    bias.bias_E.fill_(1.0)
    before = bias.bias_E
    model = torch.nn.ModuleList([bias, load, torch.nn.Linear(2, 2)]).bfloat16()
    assert model[2].weight.dtype == torch.bfloat16
    assert bias.bias_E.dtype == load.share_E.dtype == torch.float32
    assert load.counts.dtype == torch.float64
    assert bias.bias_E is before  # rules keep a reference to it
    bias.update(counts_of(0, 1, 1, 1))
    torch.testing.assert_close(bias.bias_E, torch.tensor([1.001, 0.999, 0.999, 0.999]))


def test_the_bias_is_saved():
    bias = ExpertBias(EXPERTS, 0.5)
    bias.update(counts_of(1, 0, 0, 0))
    other = ExpertBias(EXPERTS, 0.5)
    held = other.bias_E
    other.load_state_dict(bias.state_dict())
    assert held.tolist() == [-0.5, 0.5, 0.5, 0.5]
