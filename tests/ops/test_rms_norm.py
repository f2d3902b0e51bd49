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

EPS = 1e-5
SHAPES = [(1, 3), (5, 7), (3, 64), (9, 131), (0, 4), (64, 16), (130, 33)]


def setting(rows: int, width: int, dtype: torch.dtype, device: str):
    x, dy = (random_tensor(rows, width, dtype=dtype, device=device, seed=seed) for seed in range(2))
    weight = random_tensor(width, dtype=dtype, device=device, seed=2)
    return (4 * x).requires_grad_(), weight.requires_grad_(), dy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle(ops, device, shape, dtype):
    x, weight, dy = setting(*shape, dtype, device)
    y = ops.rms_norm(x, weight, EPS)
    assert y.dtype == dtype
    assert_close(y, oracle.rms_norm(float64(x), float64(weight), EPS), dtype)
    found = gradients(y, dy, x, weight)
    wanted = oracle.rms_norm_gradient(float64(dy), float64(x), float64(weight), EPS)
    for actual, expected in zip(found, wanted, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts_of_inputs_and_gradients(ops, device, layout):
    x, weight, dy = setting(6, 20, torch.float64, device)
    relaid = LAYOUTS[layout]
    found = gradients(ops.rms_norm(relaid(x), weight, EPS), relaid(dy), x, weight)
    wanted = oracle.rms_norm_gradient(float64(dy), float64(x), float64(weight), EPS)
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, expected, torch.float64)


def test_heads_in_one_tensor_with_others(ops, device):
    """The queries of attention are a part of a wider tensor."""
    whole = random_tensor(3, 2, 4, 30, dtype=torch.float64, device=device, seed=0)
    weight = random_tensor(10, dtype=torch.float64, device=device, seed=1)
    x = whole[..., 10:20]
    y = ops.rms_norm(x, weight, EPS)
    assert y.shape == x.shape
    wanted = oracle.rms_norm(float64(x).reshape(24, 10), float64(weight), EPS)
    assert_close(y.reshape(24, 10), wanted, torch.float64)


def test_weights_of_a_wider_dtype(ops, device):
    x, weight, dy = setting(5, 37, torch.bfloat16, device)
    weight = (weight.detach().float() + 1e-3).requires_grad_()
    y = ops.rms_norm(x, weight, EPS)
    _, dweight = gradients(y, dy, x, weight)
    assert (y.dtype, dweight.dtype) == (torch.bfloat16, torch.float32)
    assert_close(y, oracle.rms_norm(float64(x), float64(weight), EPS), torch.bfloat16)
    _, wanted = oracle.rms_norm_gradient(float64(dy), float64(x), float64(weight), EPS)
    assert_close(dweight, wanted, torch.float32)


def test_a_row_of_zeros(ops, device):
    x = torch.zeros(2, 8, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.full((8,), 2.0, dtype=torch.float64, device=device)
    y = ops.rms_norm(x, weight, 0.25)
    assert (y == 0).all()
    (dx,) = gradients(y, torch.ones_like(y), x)
    assert_close(dx, np.full((2, 8), 4.0), torch.float64)  # weight / sqrt(eps)


def test_not_a_number_stays_in_its_row(ops, device):
    x = torch.ones(3, 20, device=device)
    x[1, 7] = torch.nan
    y = ops.rms_norm(x, torch.ones(20, device=device), EPS)
    assert y[1].isnan().all() and y[0].isfinite().all() and y[2].isfinite().all()


def test_gradcheck(ops, device):
    x, weight, _ = setting(3, 5, torch.float64, device)
    assert torch.autograd.gradcheck(lambda x, w: ops.rms_norm(x, w, EPS), (x, weight))


def test_bf16_is_as_exact_as_torchs(reference, native, device):
    x, weight, dy = setting(200, 65, torch.bfloat16, device)
    inputs = float64(x), float64(weight)
    exact = [oracle.rms_norm(*inputs, EPS), *oracle.rms_norm_gradient(float64(dy), *inputs, EPS)]
    results = []
    for ops in (native, reference):
        y = ops.rms_norm(x, weight, EPS)
        results.append([y, *gradients(y, dy, x, weight)])
    for of_native, of_reference, wanted in zip(*results, exact, strict=True):
        assert_no_worse_than_twice(of_native, of_reference, wanted)


def test_the_backward_pass_keeps_x_and_a_number_per_row(native):
    x, weight, _ = setting(50, 64, torch.bfloat16, "cpu")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        native.rms_norm(x, weight, EPS)
    assert {(tuple(t.shape), t.dtype) for t in kept} == {
        ((50, 64), torch.bfloat16),
        ((64,), torch.bfloat16),
        ((50,), torch.float32),
    }


def test_threads_do_not_change_a_bit(native, two_threads):
    x, weight, dy = setting(700, 129, torch.float32, "cpu")
    y = native.rms_norm(x, weight, EPS)
    of_two = [y, *gradients(y, dy, x, weight)]
    torch.set_num_threads(1)
    y = native.rms_norm(x, weight, EPS)
    for two, one in zip(of_two, [y, *gradients(y, dy, x, weight)], strict=True):
        assert torch.equal(two, one)


def test_other_shapes_are_refused(native):
    x, weight, dy = setting(5, 7, torch.float32, "cpu")
    backward = torch.ops.moe_parallel.rms_norm_backward
    r = torch.ones(5)
    with pytest.raises(ValueError, match=r"weight must have shape \[7\], not \[6\]"):
        native.rms_norm(x, weight[1:], EPS)
    with pytest.raises(ValueError, match=r"dy must have shape \[5, 7\], not \[4, 7\]"):
        backward(dy[1:], x.detach(), weight.detach(), r)
    with pytest.raises(ValueError, match=r"r must have shape \[5\], not \[4\]"):
        backward(dy, x.detach(), weight.detach(), r[1:])
    with pytest.raises(TypeError, match="r must be Float for rows of Float, not Double"):
        backward(dy, x.detach(), weight.detach(), r.double())
