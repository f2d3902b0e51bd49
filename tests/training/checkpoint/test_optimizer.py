"""Ranges of flattened parameters as boxes, and their places in global tensors."""

import itertools

import numpy
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from moe_parallel.training.checkpoint.optimizer import (
    Piece,
    adam_step,
    boxes,
    moment_tensors,
    set_adam_step,
)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (3, 1, 2, 2), (1, 1), (0, 3)])
def test_boxes_cover_every_range_in_order(shape):
    numbers = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape)
    for start, stop in itertools.combinations(range(numbers.size + 1), 2):
        covered = []
        found = list(boxes(shape, start, stop))
        for box in found:
            covered += numbers[box.slices((0,) * len(shape))].ravel().tolist()
        assert covered == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)


def _moments_in_ranges(placement, parameter, cuts):
    """The moments of `parameter`, numbered, as saved by ranks that are split at `cuts`."""
    numbers = torch.arange(parameter.numel(), dtype=torch.float32)
    for start, stop in itertools.pairwise((0, *cuts, parameter.numel())):
        main = torch.zeros(stop - start)
        adam = torch.optim.Adam([main])
        adam.state[main] = {"exp_avg": numbers[start:stop], "exp_avg_sq": -numbers[start:stop]}
        yield from moment_tensors([Piece(parameter, placement, main, start, True, adam)])


def _whole(tensors, name):
    tensors = [tensor for tensor in tensors if tensor.key.startswith(f"optimizer.state.{name}.")]
    whole = numpy.full(tensors[0].global_shape, numpy.nan)
    for tensor in tensors:
        assert tensor.replica_id == (0, 1, 0)
        index = tuple(
            slice(offset, offset + size)
            for offset, size in zip(tensor.global_offset, tensor.local_shape, strict=True)
        )
        assert numpy.isnan(whole[index]).all()
        whole[index] = tensor.data.numpy()
    return whole


@pytest.mark.parametrize("cuts", [(), (1,), (5, 6, 17), (12,), (23,)])
def test_a_gated_pair_of_a_stacked_expert(cuts):
    """Expert 2 of 3, tensor-parallel shard 1 of 2 of a [gate; up] matrix of 2 * 3 rows."""
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    expert = (0, 2, 3)
    tensor = ShardedTensor.from_rank_offsets(
        "w", parameter, expert, (1, 1, 2), replica_id=(0, 1, 3), prepend_axis_num=1
    )
    placement = apply_swiglu_sharded_factory(tensor, [expert])
    tensors = list(_moments_in_ranges(placement, parameter, cuts))
    expected = numpy.full((3, 12, 4), numpy.nan)
    local = numpy.arange(24.0).reshape(6, 4)
    expected[2, 3:6], expected[2, 9:12] = local[:3], local[3:]  # gate's half, then up's half
    numpy.testing.assert_array_equal(_whole(tensors, "exp_avg"), expected)
    numpy.testing.assert_array_equal(_whole(tensors, "exp_avg_sq"), -expected)


def test_reading_fills_the_state_in_place():
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    placement = ShardedTensor.from_rank_offsets("w", parameter, replica_id=(0, 0, 0))
    main = torch.zeros(7)
    adam = torch.optim.Adam([main])
    piece = Piece(parameter, placement, main, 3, True, adam)
    for tensor in moment_tensors([piece]):
        tensor.data.fill_(1.0)
    assert adam.state[main]["exp_avg"].tolist() == [1.0] * 7


def test_an_optimizer_with_a_momentum_has_one_moment():
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    placement = ShardedTensor.from_rank_offsets("w", parameter, replica_id=(0, 0, 0))
    muon = torch.optim.SGD([parameter], momentum=0.9)  # a stand-in with the same names
    muon.state[parameter]["momentum_buffer"] = torch.ones(3, 4)
    piece = Piece(parameter, placement, parameter, 0, False, muon)
    (tensor,) = moment_tensors([piece])
    assert tensor.key == "optimizer.state.momentum_buffer.w" and tensor.data.sum() == 12
    set_adam_step([piece], 3)
    assert adam_step([piece]) == 0 and "step" not in muon.state[parameter]
