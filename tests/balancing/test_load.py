"""The loads of a step."""

import numpy
import torch
from torch import distributed as dist

from moe_parallel.balancing.load import StepLoad
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
