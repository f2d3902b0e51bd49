"""Padding of each expert's rows to a multiple."""

import pytest
import torch

from moe_parallel.ops import extension, reference, select_backend
from moe_parallel.ops.aligned_rows import aligned_rows
from moe_parallel.ops.padding import width_warning

BACKENDS = ["reference"] + ["native"] * extension.is_built()


def test_by_hand():
    """Expert 0 has three rows, expert 1 none, expert 2 two; token 1 has a single choice."""
    experts_TK = torch.tensor([[0, 2], [2, -1], [0, -1], [-1, 0]])
    row_map, sizes = aligned_rows(reference.routing_map(experts_TK, 3), 4)
    assert sizes == [4, 0, 4]
    assert row_map.counts_E.tolist() == [4, 0, 4]
    assert row_map.slots_N.tolist() == [0, 4, 7, -1, 1, 2, -1, -1]
    assert row_map.rows_TK.tolist() == [[0, 4], [5, -1], [1, -1], [-1, 2]]


@pytest.mark.parametrize(
    ("counts", "multiple", "sizes"),
    [
        ([3, 0, 16], 16, [16, 0, 16]),
        ([17, 1, 15], 16, [32, 16, 16]),
        ([1, 128, 129], 128, [128, 128, 256]),
        ([5, 7, 2], 1, [5, 7, 2]),
        ([0, 0, 0], 16, [0, 0, 0]),
    ],
)
def test_sizes(counts, multiple, sizes):
    experts_TK = torch.arange(3).repeat_interleave(torch.tensor(counts)).unsqueeze(1)
    row_map, found = aligned_rows(reference.routing_map(experts_TK, 3), multiple)
    assert found == sizes == row_map.counts_E.tolist()
    assert row_map.slots_N.numel() == sum(sizes)


def test_padding_of_a_capacity_stays_padding():
    experts_TK = torch.tensor([[1], [1], [0]])
    row_map, sizes = aligned_rows(reference.routing_map(experts_TK, 2, pad_rows_per_expert=3), 4)
    assert sizes == [4, 4]
    assert row_map.slots_N.tolist() == [2, -1, -1, -1, 0, 1, -1, -1]
    assert row_map.rows_TK.tolist() == [[4], [5], [0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_compute_the_same_with_it(backend):
    ops = select_backend(backend)
    generator = torch.Generator().manual_seed(5)
    experts_TK = torch.randint(-1, 4, (9, 2), generator=generator)
    probs_TK, x_TD = torch.rand(9, 2, generator=generator), torch.randn(9, 6, generator=generator)
    w_ED2F = torch.randn(4, 6, 10, generator=generator)
    w_EFD = torch.randn(4, 5, 6, generator=generator)
    results = []
    for multiple in (1, 8):
        leaves = [t.clone().requires_grad_() for t in (x_TD, probs_TK, w_ED2F, w_EFD)]
        row_map, _ = aligned_rows(ops.routing_map(experts_TK, 4), multiple)
        y_TD = ops.routed_experts(leaves[0], leaves[1], row_map, *leaves[2:])
        results.append([y_TD, *torch.autograd.grad(y_TD.square().sum(), leaves)])
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain)


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu():
    experts_TK = torch.randint(-1, 5, (100, 3), generator=torch.Generator().manual_seed(1))
    row_map = reference.routing_map(experts_TK, 5)
    here, sizes = aligned_rows(row_map, 16)
    there, same = aligned_rows(type(row_map)(*(t.cuda() for t in row_map)), 16)
    assert sizes == same
    for mine, its in zip(here, there, strict=True):
        assert torch.equal(mine, its.cpu())


def test_a_width_that_tensor_cores_cannot_read_is_told():
    assert width_warning(4392, 8, is_padded=True) is width_warning(8, 8, is_padded=False) is None
    plain = width_warning(4393, 8, is_padded=False, remedy="--width 4392")
    assert plain is not None and "4393 wide" in plain and "tensor cores cannot read" in plain
    padded = width_warning(4393, 8, is_padded=True, remedy="--width 4392")
    assert padded is not None and padded.endswith("weights; --width 4392 needs none")
    assert str(width_warning(4393, 8, is_padded=True)).endswith("their weights")
