import pytest
import torch

from tests.ops.cases import (
    BY_NAME,
    DTYPES,
    LAYOUTS,
    ROUTINGS,
    Routing,
    assert_close,
    assert_no_worse_than_twice,
    float64,
    gradients,
    random_tensor,
)
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering


def setting(ops, routing: Routing, width: int, dtype: torch.dtype, device: str):
    experts = torch.from_numpy(routing.experts).to(device)
    row_map = ops.routing_map(experts, routing.num_experts, routing.pad_rows_per_expert)
    x = random_tensor(len(experts), width, dtype=dtype, device=device, seed=0)
    dy = random_tensor(row_map.slots_N.numel(), width, dtype=dtype, device=device, seed=1)
    return row_map, x.requires_grad_(), dy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 135])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_equals_the_oracle(ops, device, routing, width, dtype):
    row_map, x, dy = setting(ops, routing, width, dtype, device)
    slots, choices = row_map.slots_N.tolist(), routing.experts.shape[1]
    y = ops.permute(x, row_map)
    assert y.dtype == dtype
    assert (float64(y) == oracle.permute(float64(x), slots, choices)).all()
    (dx,) = gradients(y, dy, x)
    assert dx.dtype == dtype
    assert_close(dx, oracle.permute_gradient(float64(dy), slots, choices, len(x)), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs_and_gradients(ops, device, layout):
    row_map, x, dy = setting(ops, ROUTINGS[0], 6, torch.float64, device)
    expected = ops.permute(x, row_map)
    (expected_dx,) = gradients(expected, dy, x)
    y = ops.permute(LAYOUTS[layout](x), row_map)
    assert torch.equal(y, expected)
    assert torch.equal(gradients(y, LAYOUTS[layout](dy), x)[0], expected_dx)


def test_expanded_gradient(ops, device):
    row_map, x, _ = setting(ops, ROUTINGS[0], 6, torch.float64, device)
    one = torch.ones((), dtype=x.dtype, device=device)
    y = ops.permute(x, row_map)
    (dx,) = gradients(y, one.expand_as(y), x)
    assert torch.equal(dx, torch.full_like(dx, 2.0))  # every token has two rows


@pytest.mark.parametrize("routing", [ROUTINGS[0], ROUTINGS[8], ROUTINGS[12]], ids=str)
def test_gradcheck(ops, device, routing):
    row_map, x, _ = setting(ops, routing, 3, torch.float64, device)
    assert torch.autograd.gradcheck(lambda x: ops.permute(x, row_map), (x,))
    assert torch.autograd.gradgradcheck(lambda x: ops.permute(x, row_map), (x,))


def test_bf16_gradient_is_as_exact_as_torchs(reference, native, device):
    routing = BY_NAME["many_experts"]
    row_map, x, dy = setting(reference, routing, 33, torch.bfloat16, device)
    exact = oracle.permute_gradient(float64(dy), row_map.slots_N.tolist(), 8, len(x))
    dx = {ops.name: gradients(ops.permute(x, row_map), dy, x)[0] for ops in (reference, native)}
    assert_no_worse_than_twice(dx["native"], dx["reference"], exact)


@pytest.mark.parametrize("width", [1030, 1024])  # 1024 fill cache lines
def test_a_large_output(reference, native, device, width):
    experts = torch.arange(5000, device=device).view(-1, 2) % 7
    x = random_tensor(2500, width, dtype=torch.bfloat16, device=device, seed=0)
    row_map = native.routing_map(experts, 7)
    assert torch.equal(native.permute(x, row_map), reference.permute(x, row_map))


def test_rows_that_share_a_slot(ops, device):
    row_map, x, _ = setting(ops, ROUTINGS[0], 6, torch.float32, device)
    slots = row_map.slots_N.repeat(2)
    y = ops.permute(x, row_map._replace(slots_N=slots))
    assert torch.equal(y, x[slots // 2])


def test_threads_do_not_change_a_bit(native, two_threads):
    row_map, x, _ = setting(native, ROUTINGS[10], 300, torch.float32, "cpu")
    assert torch.equal(native.permute(x, row_map), x[row_map.slots_N // 2])


def test_another_number_of_tokens_is_refused(ops, device):
    row_map, x, _ = setting(ops, ROUTINGS[0], 3, torch.float32, device)
    with pytest.raises(ValueError, match="x.* has 12 tokens, the row map 13"):
        ops.permute(x[:-1], row_map)


def test_a_slot_beyond_the_tokens_is_refused(reference, native):
    row_map, x, _ = setting(reference, ROUTINGS[0], 3, torch.float32, "cpu")
    wrong = row_map._replace(slots_N=row_map.slots_N + 100)
    for ops in (reference, native):
        with pytest.raises(IndexError):
            ops.permute(x, wrong)
