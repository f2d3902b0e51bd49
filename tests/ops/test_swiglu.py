import numpy as np
import pytest
import torch

from tests.ops.cases import (
    DTYPES,
    LAYOUTS,
    assert_close,
    assert_no_worse_than_twice,
    float64,
    gradients,
    random_tensor,
)
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering

SHAPES = [(1, 1), (5, 7), (3, 64), (9, 131), (0, 4), (4, 0)]


def setting(rows: int, width: int, dtype: torch.dtype, device: str):
    gate, up, dh = (
        random_tensor(rows, width, dtype=dtype, device=device, seed=seed) for seed in range(3)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    probs = random_tensor(rows, dtype=wide, device=device, seed=3)
    return (4 * gate).requires_grad_(), up.requires_grad_(), probs.requires_grad_(), dh


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle(ops, device, shape, dtype):
    gate, up, probs, dh = setting(*shape, dtype, device)
    h = ops.swiglu(gate, up, probs)
    assert h.dtype == dtype
    inputs = float64(gate), float64(up), float64(probs)
    assert_close(h, oracle.swiglu(*inputs), dtype)
    found = gradients(h, dh, gate, up, probs)
    wanted = oracle.swiglu_gradient(float64(dh), *inputs)
    for actual, expected, tensor in zip(found, wanted, (gate, up, probs), strict=True):
        assert actual.dtype == tensor.dtype
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_probs(ops, device, dtype):
    gate, up, _, dh = setting(5, 37, dtype, device)
    h = ops.swiglu(gate, up)
    ones = np.ones(5)
    assert_close(h, oracle.swiglu(float64(gate), float64(up), ones), dtype)
    wanted = oracle.swiglu_gradient(float64(dh), float64(gate), float64(up), ones)
    for actual, expected in zip(gradients(h, dh, gate, up), wanted[:2], strict=True):
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("layout", [*LAYOUTS, "halves of one tensor"])
def test_layouts_of_inputs_and_gradients(ops, device, layout):
    gate, up, probs, dh = setting(6, 20, torch.float64, device)
    relaid = LAYOUTS.get(layout, lambda tensor: tensor)
    of_layout = relaid(gate), relaid(up)
    if layout == "halves of one tensor":
        of_layout = torch.cat([gate, up], 1).chunk(2, dim=1)
    found = gradients(ops.swiglu(*of_layout, probs), relaid(dh), gate, up, probs)
    wanted = oracle.swiglu_gradient(float64(dh), float64(gate), float64(up), float64(probs))
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, expected, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_halves_of_one_tensor(ops, device, shape, dtype):
    gate, up, _, dh = setting(*shape, dtype, device)
    gate_up = torch.cat([gate, up], 1).detach().requires_grad_()
    h = ops.swiglu_halves(gate_up)
    ones = np.ones(shape[0])
    assert_close(h, oracle.swiglu(float64(gate), float64(up), ones), dtype)
    wanted = oracle.swiglu_gradient(float64(dh), float64(gate), float64(up), ones)
    (found,) = gradients(h, dh, gate_up)
    assert found.shape == gate_up.shape and found.is_contiguous()
    assert_close(found, np.concatenate(wanted[:2], 1), dtype)


def test_far_from_zero(ops, device):
    """exp must neither overflow to NaN nor stop before the limits."""
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4]], device=device)
    h = ops.swiglu(gate.requires_grad_(), torch.ones_like(gate))
    wanted = oracle.swiglu(float64(gate), np.ones((1, 7)), np.ones(1))
    np.testing.assert_allclose(float64(h), wanted, rtol=1e-6, atol=1e-30)
    (dgate,) = gradients(h, torch.ones_like(h), gate)
    np.testing.assert_allclose(float64(dgate), [[0, 0, 0, 0.5, 1, 1, 1]], atol=1e-6)


def test_not_a_number_and_infinity_stay_visible(ops, device):
    gate = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0] * 5], device=device)
    up = torch.ones_like(gate)
    up[0, 3] = torch.nan
    h = ops.swiglu(gate, up)[0]
    assert h[0].isnan() and h[1] == torch.inf and h[3].isnan() and h[7].isfinite()


def test_gradcheck(ops, device):
    gate, up, probs, _ = setting(3, 5, torch.float64, device)
    assert torch.autograd.gradcheck(ops.swiglu, (gate, up, probs))


def test_bf16_is_as_exact_as_torchs(reference, native, device):
    gate, up, probs, dh = setting(33, 65, torch.bfloat16, device)
    inputs = float64(gate), float64(up), float64(probs)
    exact = [oracle.swiglu(*inputs), *oracle.swiglu_gradient(float64(dh), *inputs)]
    results = []
    for ops in (native, reference):
        h = ops.swiglu(gate, up, probs)
        results.append([h, *gradients(h, dh, gate, up, probs)])
    for of_native, of_reference, wanted in zip(*results, exact, strict=True):
        if of_native.dtype == torch.bfloat16:
            assert_no_worse_than_twice(of_native, of_reference, wanted)
        else:
            assert_close(of_native, wanted, torch.float32)


def test_threads_do_not_change_a_bit(native, two_threads):
    gate, up, probs, dh = setting(70, 1000, torch.float32, "cpu")
    h = native.swiglu(gate, up, probs)
    of_two = [h, *gradients(h, dh, gate, up, probs)]
    torch.set_num_threads(1)
    h = native.swiglu(gate, up, probs)
    for two, one in zip(of_two, [h, *gradients(h, dh, gate, up, probs)], strict=True):
        assert torch.equal(two, one)


def test_other_shapes_are_refused(native, device):
    gate, up, probs, dh = setting(5, 7, torch.float32, device)
    with pytest.raises(ValueError, match="gate_up must have two equal halves, not 7 columns"):
        native.swiglu_halves(gate)
    with pytest.raises(ValueError, match=r"dh must have shape \[5, 3\], not \[5, 7\]"):
        torch.ops.moe_parallel.swiglu_halves_backward(dh, gate[:, 1:].detach())
    with pytest.raises(ValueError, match=r"up must have shape \[5, 7\], not \[4, 7\]"):
        native.swiglu(gate, up[1:], probs)
    with pytest.raises(ValueError, match=r"probs must have shape \[5\], not \[4\]"):
        native.swiglu(gate, up, probs[1:])
    with pytest.raises(TypeError, match="up is Double, gate is Float"):
        native.swiglu(gate, up.double(), probs)
