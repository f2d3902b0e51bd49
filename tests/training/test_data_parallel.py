"""Gradients are added to main gradients with the bits of torch's addition."""

from unittest import mock

import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups
from moe_parallel.training import optimizer as data_parallel
from moe_parallel.training.optimizer import PIECE, add_in_pieces
from tests import systems
from tests.distributed import run_distributed
from tests.model.small_gpt import SIZES, build, micro_batches
from tests.tiers import rest_in_full


@pytest.mark.parametrize("shape", [(), (3, 5), (PIECE,), (2, PIECE + 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bits_are_those_of_one_addition(shape, dtype):
    total, x = torch.randn(shape), torch.randn(shape).to(dtype)
    wanted = total + x
    add_in_pieces(total, x)
    assert torch.equal(total, wanted)


def test_a_gradient_whose_numbers_are_not_in_order():
    total, x = torch.randn(7, 4), torch.randn(4, 7).bfloat16().t()
    wanted = total + x
    add_in_pieces(total, x)
    assert torch.equal(total, wanted)


BF16 = {"bf16": True, "global_batch_size": 8, "micro_batch_size": 2}


def _three_steps(options):
    config = make_config(SIZES | options)
    engine = build(config)
    steps = [engine.step(micro_batches(config, 4 * step, engine)) for step in range(3)]
    destroy_groups()
    return [(step.lm_loss, step.grad_norm) for step in steps]


def _train_both_ways(options):
    in_pieces = _three_steps(options)
    with mock.patch.object(data_parallel, "_is_added_slowly", return_value=False) as asked:
        at_once = _three_steps(options)
    assert asked.call_count > 0
    return in_pieces, at_once


@pytest.mark.parametrize("world", rest_in_full([1, 2], 2))
def test_a_run_in_bf16_is_the_run_of_megatrons_hook(world):
    """Two ranks reduce gradients while others are still computed, which the hook begins."""
    options = systems.options("aoe") | BF16
    if world == 2:
        options |= {"overlap_grad_reduce": True, "ddp_bucket_size": 2000}
    for in_pieces, at_once in run_distributed(world, _train_both_ways, options):
        assert in_pieces == at_once
        assert len(set(in_pieces)) == 3
