import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from moe_parallel.ops.fp32_linear import fp32_dot, fp32_linear
from tests.ops.cases import assert_close, float64, gradients, random_tensor

TOKENS = {"tokens": (40,), "sequences": (5, 8), "no tokens": (0,)}
DTYPES = [torch.float32, torch.bfloat16]


def setting(tokens, columns, dtype, weight_dtype, device):
    x = random_tensor(*tokens, 48, dtype=dtype, device=device, seed=0).requires_grad_()
    weight = random_tensor(columns, 48, dtype=weight_dtype, device=device, seed=1).requires_grad_()
    dy = random_tensor(*tokens, columns, dtype=torch.float32, device=device, seed=2)
    return x, weight, dy


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", list(TOKENS))
@pytest.mark.parametrize(("layer", "columns"), [(fp32_linear, 6), (fp32_dot, 1)])
def test_equals_the_product(device, layer, columns, tokens, dtype, weight_dtype):
    x, weight, dy = setting(TOKENS[tokens], columns, dtype, weight_dtype, device)
    y = layer(x, weight)
    assert y.dtype == torch.float32
    rows, upstream = float64(x).reshape(-1, 48), float64(dy).reshape(-1, columns)
    # In fp32: rounded to bf16, the sums would be off by a hundred times as much.
    assert_close(y.flatten(0, -2), rows @ float64(weight).T, torch.float32)
    dx, dweight = gradients(y, dy, x, weight)
    assert (dx.dtype, dweight.dtype) == (dtype, weight_dtype)
    assert_close(dx.flatten(0, -2), upstream @ float64(weight), dtype)
    assert_close(dweight, upstream.T @ rows, weight_dtype)


@pytest.mark.parametrize(("layer", "columns"), [(fp32_linear, 6), (fp32_dot, 1)])
def test_nothing_is_kept_but_x_and_the_weight(device, layer, columns):
    x, weight, _ = setting((40,), columns, torch.bfloat16, torch.bfloat16, device)
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        layer(x, weight)
    assert kept == [x.data_ptr(), weight.data_ptr()]
