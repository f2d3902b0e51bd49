"""Causal attention beside its oracle (test_operators.py): layouts, limits, what it keeps."""

import numpy as np
import pytest
import torch

from moe_parallel.ops.causal_attention import serves
from tests.ops.cases import LAYOUTS, assert_close, float64, gradients, random_tensor
from tests.oracles.ops import attention, attention_gradient
from tests.tiers import rest_in_full

pytestmark = pytest.mark.covering

# Length, batch, heads of queries, heads of keys, width. Blocks have 64 queries and 256 keys.
ONE = (1, 1, 1, 1, 2)
SMALL = (9, 2, 4, 2, 6)
TAILS = (300, 1, 3, 1, 16)
WIDE = (130, 1, 2, 2, 256)


@pytest.fixture(params=["cpu"])
def device(request):
    """There is no kernel for CUDA."""
    return request.param


def setting(shape, dtype, seed=0):
    """q, k, v with gradients, and the gradient of the output. Weights differ by powers of e."""
    length, batch, heads, groups, width = shape
    shapes = [(length, batch, n, width) for n in (heads, groups, groups, heads)]
    q, k, v, dout = (
        random_tensor(*each, dtype=dtype, device="cpu", seed=seed + i)
        for i, each in enumerate(shapes)
    )
    return [x.requires_grad_() for x in (2 * q, k, v)], dout


def test_worked_by_hand(ops, device):
    """Two tokens: the second one sees keys whose weights are 1/4 and 3/4."""
    q = torch.tensor([5.0, 0, 1, 0]).view(2, 1, 1, 2)
    k = torch.tensor([0.0, 7, float(np.log(3)) / 2, -7]).view(2, 1, 1, 2)
    v = torch.tensor([4.0, 8, 0, -8]).view(2, 1, 1, 2)
    out = ops.attention(q, k, v, 2.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 8, 1, -4]))


@pytest.mark.parametrize("library", rest_in_full(["BLAS", "ONEDNN"], "BLAS"), indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_library(library, native, dtype):
    qkv, dout = setting(TAILS, dtype)
    out = native.attention(*qkv, 0.25)
    given = [float64(x) for x in qkv]
    assert_close(out, attention(*given, 0.25), dtype)
    wanted = attention_gradient(float64(dout), *given, 0.25)
    for actual, expected in zip(gradients(out, dout, *qkv), wanted, strict=True):
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, "heads first", "part of a projection"])
def test_layouts_of_inputs_and_gradients(native, layout, dtype):
    qkv, dout = setting((70, 2, 4, 2, 16), dtype)
    if layout == "heads first":
        relaid = [x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in (*qkv, dout)]
    elif layout == "part of a projection":
        relaid = list(torch.cat([*qkv, dout], 2).split([4, 2, 2, 4], 2))
    else:
        relaid = [LAYOUTS[layout](x) for x in (*qkv, dout)]
    of_layout = native.attention(*relaid[:3], 0.3)
    plain = native.attention(*qkv, 0.3)
    assert torch.equal(of_layout, plain)
    pairs = zip(gradients(of_layout, relaid[3], *qkv), gradients(plain, dout, *qkv), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_large_scores_neither_overflow_nor_vanish(native):
    """Scores up to several thousands: the largest weight is 1."""
    (q, k, v), dout = setting((260, 1, 1, 1, 16), torch.float32)
    out = native.attention(300 * q, k, v, 1.0)
    given = [float64(300 * q), float64(k), float64(v)]
    assert_close(out, attention(*given, 1.0), torch.bfloat16)
    assert all(each.isfinite().all() for each in gradients(out, dout, q, k, v))


def test_nan_is_not_hidden(native):
    (q, k, v), dout = setting((40, 1, 1, 1, 16), torch.float32)
    with torch.no_grad():
        k[20, 0, 0, 3] = torch.nan
    out = native.attention(q, k, v, 0.3)
    assert out[20:].isnan().all() and out[:20].isfinite().all()
    assert gradients(out, dout, q)[0][20:].isnan().all()


def test_only_inputs_and_outputs_are_kept(native):
    qkv, _ = setting((300, 1, 4, 2, 16), torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        native.attention(*qkv, 0.3)
    assert sorted(x.numel() for x in kept) == sorted([300 * 4] + 2 * [300 * 64] + 2 * [300 * 32])


def test_what_it_serves():
    def of(dtype, width=64, value_width=None, keys=8):
        q = torch.empty(8, 1, 4, width, dtype=dtype)
        k = torch.empty(keys, 1, 2, width, dtype=dtype)
        return q, k, k[..., :value_width]

    assert not serves(*of(torch.float64))
    assert not serves(*of(torch.float32, 3))
    assert not serves(*of(torch.float32, 258))
    assert not serves(*of(torch.float32, 64, 32))
    assert not serves(*of(torch.float32, keys=9))
    assert not serves(*(x.to("meta") for x in of(torch.float32)))
