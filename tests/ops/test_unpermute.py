import numpy as np
import pytest
import torch

from moe_parallel.errors import InputError
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
from tests.tiers import rest_in_full

pytestmark = pytest.mark.covering


def setting(ops, routing: Routing, width: int, dtype: torch.dtype, device: str):
    """The row map, rows y and probs that need gradients, and an upstream gradient."""
    experts = torch.from_numpy(routing.experts).to(device)
    row_map = ops.routing_map(experts, routing.num_experts, routing.pad_rows_per_expert)
    y = random_tensor(row_map.slots_N.numel(), width, dtype=dtype, device=device, seed=0)
    gate_type = torch.float64 if dtype == torch.float64 else torch.float32
    probs = random_tensor(*experts.shape, dtype=gate_type, device=device, seed=1)
    dout = random_tensor(len(experts), width, dtype=dtype, device=device, seed=2)
    return row_map, y.requires_grad_(), probs.requires_grad_(), dout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 135])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_weighted_sum_equals_the_oracle(ops, device, routing, width, dtype):
    row_map, y, probs, dout = setting(ops, routing, width, dtype, device)
    slots = row_map.slots_N.tolist()
    out = ops.unpermute(y, row_map, probs)
    assert out.dtype == dtype
    assert_close(out, oracle.unpermute(float64(y), slots, float64(probs)), dtype)
    dy, dprobs = gradients(out, dout, y, probs)
    assert (dy.dtype, dprobs.dtype) == (dtype, probs.dtype)
    wanted = oracle.unpermute_gradient(float64(dout), float64(y), slots, float64(probs))
    assert_close(dy, wanted[0], dtype)
    assert_close(dprobs, wanted[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_plain_sum_equals_the_oracle(ops, device, routing, dtype):
    row_map, y, probs, dout = setting(ops, routing, 5, dtype, device)
    slots, ones = row_map.slots_N.tolist(), np.ones(probs.shape)
    out = ops.unpermute(y, row_map)
    assert_close(out, oracle.unpermute(float64(y), slots, ones), dtype)
    (dy,) = gradients(out, dout, y)
    wanted, _ = oracle.unpermute_gradient(float64(dout), float64(y), slots, ones)
    assert_close(dy, wanted, dtype)


def test_more_columns_than_are_summed_at_a_time(ops, device):
    row_map, y, probs, dout = setting(ops, ROUTINGS[0], 2500, torch.float32, device)
    slots = row_map.slots_N.tolist()
    out = ops.unpermute(y, row_map, probs)
    assert_close(out, oracle.unpermute(float64(y), slots, float64(probs)), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choices", rest_in_full([2, 6], 2))
def test_large_outputs_of_whole_cache_lines(reference, native, device, choices, dtype):
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs_and_gradients(ops, device, layout):
    row_map, y, probs, dout = setting(ops, ROUTINGS[12], 6, torch.float64, device)
    expected = ops.unpermute(y, row_map, probs)
    expected_gradients = gradients(expected, dout, y, probs)
    relaid = LAYOUTS[layout]
    # How a GPU's lanes share a sum depends on the width of their reads, and so on addresses.
    equal = torch.equal if device == "cpu" else torch.allclose
    out = ops.unpermute(relaid(y), row_map, relaid(probs))
    assert equal(out, expected)
    for actual, wanted in zip(
        gradients(out, relaid(dout), y, probs), expected_gradients, strict=True
    ):
        assert equal(actual, wanted)


def test_expanded_gradient(ops, device):
    row_map, y, probs, _ = setting(ops, ROUTINGS[0], 6, torch.float64, device)
    dy, dprobs = torch.autograd.grad(ops.unpermute(y, row_map, probs).sum(), (y, probs))
    slots, ones = row_map.slots_N.tolist(), np.ones((13, 6))
    wanted = oracle.unpermute_gradient(ones, float64(y), slots, float64(probs))
    assert_close(dy, wanted[0], torch.float64)
    assert_close(dprobs, wanted[1], torch.float64)


def test_probs_in_the_type_of_the_rows(ops, device):
    row_map, y, probs, dout = setting(ops, ROUTINGS[0], 6, torch.bfloat16, device)
    probs = probs.detach().bfloat16().requires_grad_()
    out = ops.unpermute(y, row_map, probs)
    slots = row_map.slots_N.tolist()
    assert_close(out, oracle.unpermute(float64(y), slots, float64(probs)), torch.bfloat16)
    assert gradients(out, dout, probs)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("routing", [ROUTINGS[0], ROUTINGS[8], ROUTINGS[12]], ids=str)
def test_gradcheck(ops, device, routing):
    row_map, y, probs, _ = setting(ops, routing, 3, torch.float64, device)
    assert torch.autograd.gradcheck(lambda y, g: ops.unpermute(y, row_map, g), (y, probs))
    assert torch.autograd.gradgradcheck(lambda y: ops.unpermute(y, row_map), (y,))


def test_bf16_is_as_exact_as_torchs(reference, native, device):
    routing = BY_NAME["many_experts"]
    row_map, y, probs, dout = setting(reference, routing, 33, torch.bfloat16, device)
    slots = row_map.slots_N.tolist()
    exact = [
        oracle.unpermute(float64(y), slots, float64(probs)),
        *oracle.unpermute_gradient(float64(dout), float64(y), slots, float64(probs)),
    ]
    results = []
    for ops in (native, reference):
        out = ops.unpermute(y, row_map, probs)
        results.append([out, *gradients(out, dout, y, probs)])
    for of_native, of_reference, wanted in zip(*results, exact, strict=True):
        assert_no_worse_than_twice(of_native, of_reference, wanted)


def test_threads_do_not_change_a_bit(native, two_threads):
    row_map, y, probs, dout = setting(native, ROUTINGS[10], 300, torch.float32, "cpu")
    of_two = native.unpermute(y, row_map, probs)
    of_two = [of_two, *gradients(of_two, dout, y, probs)]
    torch.set_num_threads(1)
    of_one = native.unpermute(y, row_map, probs)
    of_one = [of_one, *gradients(of_one, dout, y, probs)]
    for two, one in zip(of_two, of_one, strict=True):
        assert torch.equal(two, one)


def test_the_weighted_gradient_cannot_be_differentiated_again(native):
    row_map, y, probs, _ = setting(native, ROUTINGS[0], 3, torch.float64, "cpu")
    out = native.unpermute(y, row_map, probs)
    with pytest.raises(InputError, match="a second derivative, which this operator does not have"):
        torch.autograd.grad(out.square().sum(), y, create_graph=True)


def test_other_shapes_are_refused(ops, device):
    row_map, y, probs, _ = setting(ops, ROUTINGS[0], 3, torch.float32, device)
    with pytest.raises(ValueError, match="y.* has 25 rows, the row map 26"):
        ops.unpermute(y[:-1], row_map)
    with pytest.raises(ValueError, match="probs.*the row map"):
        ops.unpermute(y, row_map, probs[:, :1])


def test_a_row_beyond_the_last_is_refused(reference, native):
    row_map, y, probs, _ = setting(reference, ROUTINGS[0], 3, torch.float32, "cpu")
    wrong = row_map._replace(rows_TK=row_map.rows_TK + 100)
    for ops in (reference, native):
        with pytest.raises(IndexError):
            ops.unpermute(y, wrong, probs)
