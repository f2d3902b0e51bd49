"""Rows of experts: their map, rows with padding, and copies of tokens at the edges."""

import numpy as np
import pytest
import torch

from moe_parallel.errors import InputError
from moe_parallel.ops import reference as in_torch
from moe_parallel.ops.aligned_rows import aligned_rows
from moe_parallel.ops.padding import width_warning
from tests.ops.cases import ROUTINGS, Routing, assert_close, float64, gradients, random_tensor
from tests.oracles import ops as oracle
from tests.tiers import rest_in_full


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_the_map_equals_the_oracle(ops, device, routing: Routing):
    given = routing.num_experts, routing.pad_rows_per_expert
    row_map = ops.routing_map(torch.from_numpy(routing.experts).to(device), *given)
    for actual, wanted in zip(row_map, oracle.routing_map(routing.experts, *given), strict=True):
        assert actual.dtype == torch.int64 and actual.device.type == device
        np.testing.assert_array_equal(actual.cpu().numpy(), wanted)


@pytest.mark.parametrize("more", [-2, 3])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_a_map_of_a_fixed_number_of_rows(ops, device, routing: Routing, more):
    """The first of the rows, or all and padding of no expert."""
    slots, rows, counts = oracle.routing_map(routing.experts, routing.num_experts)
    number = max(0, len(slots) + more)
    experts = torch.from_numpy(routing.experts).to(device)
    row_map = ops.routing_map(experts, routing.num_experts, max_rows=number)
    wanted_slots = [*slots, -1, -1, -1][:number]
    np.testing.assert_array_equal(row_map.slots_N.cpu().numpy(), wanted_slots)
    np.testing.assert_array_equal(row_map.rows_TK.cpu().numpy(), np.where(rows < number, rows, -1))
    ends = np.minimum(np.cumsum(counts), number)
    np.testing.assert_array_equal(row_map.counts_E.cpu().numpy(), np.diff(ends, prepend=0))


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_choices_beyond_the_rows_of_an_expert_are_left_out(ops, device, routing: Routing):
    slots, rows, counts = oracle.routing_map(routing.experts, routing.num_experts)
    pad = int(counts.max(initial=0)) * 2 // 3
    by_expert = np.split(slots, np.cumsum(counts)[:-1]) if len(counts) else []
    wanted = [[*its[:pad], *[-1] * max(0, pad - len(its))] for its in by_expert]
    experts = torch.from_numpy(routing.experts).to(device)
    row_map = ops.routing_map(experts, routing.num_experts, pad, max_rows=1)
    found = row_map.slots_N.cpu().numpy()
    np.testing.assert_array_equal(found, np.concatenate([[], *wanted]))
    kept = np.full(rows.size, -1)
    kept[found[found >= 0]] = np.flatnonzero(found >= 0)
    np.testing.assert_array_equal(row_map.rows_TK.cpu().numpy().ravel(), kept)
    assert row_map.counts_E.tolist() == [pad] * routing.num_experts


def test_a_map_by_hand(ops, device):
    experts = torch.tensor([[1, 1, 0], [2, -1, 2]], device=device).t()  # a transposed tensor
    row_map = ops.routing_map(experts, 4)
    assert row_map.slots_N.tolist() == [4, 0, 2, 1, 5]
    assert row_map.rows_TK.tolist() == [[1, 3], [2, -1], [0, 4]]
    assert row_map.counts_E.tolist() == [1, 2, 2, 0]


@pytest.mark.parametrize("width", [1030, 1024])  # 1024 fill cache lines
def test_a_large_copy(reference, native, device, width):
    experts = torch.arange(5000, device=device).view(-1, 2) % 7
    x = random_tensor(2500, width, dtype=torch.bfloat16, device=device, seed=0)
    row_map = native.routing_map(experts, 7)
    assert torch.equal(native.permute(x, row_map), reference.permute(x, row_map))


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choices", rest_in_full([2, 6], 2))
def test_large_sums_of_whole_cache_lines(reference, native, device, choices, dtype):
    """On some processors their rows are stored past the caches. Some choices are dropped."""
    tokens, width = 4200, 1056  # more than 8 MiB, and not a multiple of four vectors
    experts = torch.arange(tokens * choices, device=device).view(tokens, choices) % 7
    experts[::5, 0] = -1
    experts[::35] = -1
    row_map = native.routing_map(experts, 7)
    y = random_tensor(row_map.slots_N.numel(), width, dtype=dtype, device=device, seed=0)
    probs = random_tensor(tokens, choices, dtype=torch.float32, device=device, seed=1)
    dout = random_tensor(tokens, width, dtype=dtype, device=device, seed=2)
    found = []
    for ops in (reference, native):
        inputs = y.clone().requires_grad_(), probs.clone().requires_grad_()
        out = ops.unpermute(inputs[0], row_map, inputs[1])
        found.append([out, *gradients(out, dout, *inputs)])
    for wanted, actual in zip(*found, strict=True):
        assert_close(actual, float64(wanted), dtype)


def test_probs_in_the_type_of_the_rows(ops, device):
    row_map = ops.routing_map(torch.tensor([[0, 1], [1, -1]], device=device), 2)
    probs = torch.tensor([[0.5, 2], [4, 9]], dtype=torch.bfloat16, device=device).requires_grad_()
    y = torch.tensor([[1.0], [3], [5]], dtype=torch.bfloat16, device=device)
    out = ops.unpermute(y, row_map, probs)
    assert out.tolist() == [[6.5], [20]]
    (dprobs,) = gradients(out, torch.ones_like(out), probs)
    assert dprobs.dtype == torch.bfloat16 and dprobs.tolist() == [[1, 3], [5, 0]]


def test_the_weighted_gradient_cannot_be_differentiated_again(native, device):
    row_map = native.routing_map(torch.tensor([[0]], device=device), 1)
    y, probs = (torch.ones(1, 1, device=device, requires_grad=True) for _ in range(2))
    with pytest.raises(InputError, match="a second derivative, which this operator does not have"):
        out = native.unpermute(y, row_map, probs)
        torch.autograd.grad(out.square().sum(), y, create_graph=True)


# Rows per expert in multiples, as tensor cores need them.


def test_padding_by_hand():
    """Expert 0 has three rows, expert 1 none, expert 2 two; token 1 has a single choice."""
    experts_TK = torch.tensor([[0, 2], [2, -1], [0, -1], [-1, 0]])
    row_map, sizes = aligned_rows(in_torch.routing_map(experts_TK, 3), 4)
    assert sizes == row_map.counts_E.tolist() == [4, 0, 4]
    assert row_map.slots_N.tolist() == [0, 4, 7, -1, 1, 2, -1, -1]
    assert row_map.rows_TK.tolist() == [[0, 4], [5, -1], [1, -1], [-1, 2]]


def test_experts_compute_the_same_with_padding(ops, device):
    generator = torch.Generator().manual_seed(5)
    experts_TK = torch.randint(-1, 4, (9, 2), generator=generator).to(device)
    shapes = (9, 6), (9, 2), (4, 6, 10), (4, 5, 6)
    given = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    results = []
    for multiple in (1, 8):
        x_TD, probs_TK, *weights = leaves = [t.clone().requires_grad_() for t in given]
        row_map, _ = aligned_rows(ops.routing_map(experts_TK, 4), multiple)
        y_TD = ops.routed_experts(x_TD, probs_TK, row_map, *weights)
        results.append([y_TD, *torch.autograd.grad(y_TD.square().sum(), leaves)])
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain)


def test_a_width_that_tensor_cores_cannot_read_is_told():
    assert width_warning(4392, 8, is_padded=True) is width_warning(8, 8, is_padded=False) is None
    plain = width_warning(4393, 8, is_padded=False, remedy="--width 4392")
    assert plain is not None and "4393 wide" in plain and "tensor cores cannot read" in plain
    padded = width_warning(4393, 8, is_padded=True, remedy="--width 4392")
    assert padded is not None and padded.endswith("weights; --width 4392 needs none")
