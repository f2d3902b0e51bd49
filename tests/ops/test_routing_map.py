import numpy as np
import pytest
import torch

from tests.ops.cases import ROUTINGS, Routing
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_equals_the_oracle(ops, device, routing: Routing):
    experts = torch.from_numpy(routing.experts).to(device)
    row_map = ops.routing_map(experts, routing.num_experts, routing.pad_rows_per_expert)
    expected = oracle.routing_map(routing.experts, routing.num_experts, routing.pad_rows_per_expert)
    for actual, wanted in zip(row_map, expected, strict=True):
        assert actual.dtype == torch.int64
        np.testing.assert_array_equal(actual.cpu().numpy(), wanted)
    assert {tensor.device.type for tensor in row_map} == {device}


def test_worked_by_hand(ops, device):
    experts = torch.tensor([[1, 2], [1, -1], [0, 2]], device=device)
    row_map = ops.routing_map(experts, 4)
    assert row_map.slots_N.tolist() == [4, 0, 2, 1, 5]
    assert row_map.rows_TK.tolist() == [[1, 3], [2, -1], [0, 4]]
    assert row_map.counts_E.tolist() == [1, 2, 2, 0]


def test_takes_a_transposed_tensor(ops, device):
    experts = torch.tensor([[1, 1, 0], [2, -1, 2]], device=device).t()
    assert ops.routing_map(experts, 3).slots_N.tolist() == [4, 0, 2, 1, 5]


@pytest.mark.parametrize("device", ["cpu"])  # on a GPU the host does not wait for the counts
def test_an_expert_with_too_many_choices_is_refused(ops, device):
    experts = torch.tensor([[0], [0], [1]], device=device)
    with pytest.raises(ValueError, match="2 choices, more than its 1 rows"):
        ops.routing_map(experts, 2, 1)


@pytest.mark.parametrize("device", ["cpu"])
def test_an_expert_beyond_the_last_is_refused(ops, device):
    with pytest.raises(ValueError, match="4 experts"):
        ops.routing_map(torch.tensor([[0], [4]], device=device), 4)
