"""The loads of a step, and the bias that follows them."""

import numpy
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
    """`share_E` after each step, of micro-batches dealt to the ranks in turn."""
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
    load.counts[:] = 2.0**24  # where fp32 would stop counting
    load.count(choices_of([[0], [0], [1]]))
    assert (load.counts - 2**24).tolist() == [2, 1, 0, 0, 3]


def test_a_step_moves_the_bias_by_exactly_the_rate():
    bias = ExpertBias(EXPERTS, update_rate=0.25)
    bias.update(torch.tensor([0.9, 0.1, 0.5, 0.5]))  # mean 0.5: too many, too few, as it should be
    assert bias.bias_E.tolist() == [-0.25, 0.25, 0.0, 0.0]
    bias.update(torch.tensor([0.9, 0.1, 0.4, 0.6]))
    assert bias.bias_E.tolist() == [-0.5, 0.5, 0.25, -0.25]


def test_the_bias_moves_alike_for_counts_and_shares():
    load = torch.tensor([7.0, 1.0, 3.0, 5.0])
    moved = []
    for scale in (1.0, 1 / 16):
        bias = ExpertBias(EXPERTS, update_rate=1e-3)
        bias.update(load * scale)
        moved.append(bias.bias_E.tolist())
    assert moved[0] == moved[1]


def test_an_even_load_leaves_the_bias():
    bias = ExpertBias(EXPERTS, update_rate=0.1)
    bias.update(torch.full((EXPERTS,), 0.5))
    assert bias.bias_E.tolist() == [0.0] * EXPERTS


def test_bf16_models_keep_fp32_biases_and_loads():
    """In bf16 a bias of 1 would no longer feel a step of 0.001."""
    bias, load = ExpertBias(EXPERTS, 1e-3), StepLoad(EXPERTS)
    bias.bias_E.fill_(1.0)
    before = bias.bias_E
    model = torch.nn.ModuleList([bias, load, torch.nn.Linear(2, 2)]).bfloat16()
    assert model[2].weight.dtype == torch.bfloat16
    assert bias.bias_E.dtype == load.share_E.dtype == torch.float32
    assert load.counts.dtype == torch.float64
    assert bias.bias_E is before  # rules hold it
    bias.update(torch.tensor([0.0, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(bias.bias_E, torch.tensor([1.001, 0.999, 0.999, 0.999]))


def test_the_bias_is_saved():
    bias = ExpertBias(EXPERTS, 0.5)
    bias.update(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    other = ExpertBias(EXPERTS, 0.5)
    held = other.bias_E
    other.load_state_dict(bias.state_dict())
    assert held.tolist() == [-0.5, 0.5, 0.5, 0.5]
