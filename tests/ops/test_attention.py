"""Causal attention against a loop over queries in fp64, with its gradient by hand."""

import numpy as np
import pytest
import torch

from moe_parallel.ops.causal_attention import serves
from tests.ops.cases import (
    LAYOUTS,
    assert_close,
    assert_no_worse_than_twice,
    float64,
    gradients,
    random_tensor,
)
from tests.tiers import rest_in_full

pytestmark = pytest.mark.covering

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Length, batch, heads of queries, heads of keys, width. Blocks have 64 queries and 256 keys.
ONE = (1, 1, 1, 1, 2)
SMALL = (9, 2, 4, 2, 6)
TAILS = (300, 1, 3, 1, 16)
WIDE = (130, 1, 2, 2, 256)
BLOCKS = (512, 1, 1, 1, 64)
LONG = (1025, 1, 2, 1, 64)
SHAPES = rest_in_full([ONE, SMALL, (0, 2, 2, 1, 4), (5, 0, 2, 1, 4), TAILS, WIDE, BLOCKS, LONG],
                      ONE, SMALL, (0, 2, 2, 1, 4), (5, 0, 2, 1, 4), TAILS, WIDE)  # fmt: skip


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


def by_definition(q, k, v, scale, dout=None):
    """The output, [S, B, H, C], or with its gradient those of q, k, v. One head at a time."""
    out, dq, dk, dv = (np.zeros(x.shape) for x in (q, q, k, v))
    seen = np.tril(np.ones((len(q), len(q)), dtype=bool))
    for b, h in np.ndindex(q.shape[1:3]):
        g = h // (q.shape[2] // k.shape[2])
        scores = np.where(seen, scale * q[:, b, h] @ k[:, b, g].T, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True, initial=-np.inf))
        weights /= weights.sum(1, keepdims=True)
        out[:, b, h] = weights @ v[:, b, g]
        if dout is None:
            continue
        dweights = dout[:, b, h] @ v[:, b, g].T
        dscores = weights * (dweights - (weights * dweights).sum(1, keepdims=True))
        dq[:, b, h] = scale * dscores @ k[:, b, g]
        dk[:, b, g] += scale * dscores.T @ q[:, b, h]
        dv[:, b, g] += weights.T @ dout[:, b, h]
    return out if dout is None else (dq, dk, dv)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(ops, device, shape, dtype):
    qkv, dout = setting(shape, dtype)
    scale = shape[-1] ** -0.5
    out = ops.attention(*qkv, scale)
    assert out.dtype == dtype and out.shape == qkv[0].shape
    given = [float64(x) for x in qkv]
    assert_close(out, by_definition(*given, scale), dtype)
    found = gradients(out, dout, *qkv)
    for actual, expected in zip(found, by_definition(*given, scale, float64(dout)), strict=True):
        assert actual.dtype == dtype
        assert_close(actual, expected, dtype)


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
    assert_close(out, by_definition(*given, 0.25), dtype)
    wanted = by_definition(*given, 0.25, float64(dout))
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


@pytest.mark.parametrize("shape", [SMALL, (40, 1, 2, 1, 2)], ids=str)
def test_gradcheck(ops, device, shape):
    qkv, _ = setting(shape, torch.float64)
    assert torch.autograd.gradcheck(lambda *x: ops.attention(*x, 0.4), qkv, fast_mode=True)


def test_bf16_is_as_exact_as_torchs(reference, native):
    qkv, dout = setting((200, 1, 2, 1, 32), torch.bfloat16)
    given = [float64(x) for x in qkv]
    exact = [by_definition(*given, 0.2), *by_definition(*given, 0.2, float64(dout))]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        torchs = torch.nn.functional.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in qkv), is_causal=True, scale=0.2, enable_gqa=True
        ).permute(2, 0, 1, 3)
    own = native.attention(*qkv, 0.2)
    results = [[out, *gradients(out, dout, *qkv)] for out in (own, torchs)]
    for of_native, of_torch, wanted in zip(*results, exact, strict=True):
        assert_no_worse_than_twice(of_native, of_torch, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_do_not_change_a_bit(native, two_threads, dtype):
    qkv, dout = setting((300, 2, 4, 2, 32), dtype)
    results = []
    for threads in (2, 1, 1):
        torch.set_num_threads(threads)
        out = native.attention(*qkv, 0.3)
        results.append([out, *gradients(out, dout, *qkv)])
    for two, one, again in zip(*results, strict=True):
        assert torch.equal(two, one) and torch.equal(one, again)


def test_later_tokens_change_nothing(native):
    (q, k, v), _ = setting((300, 1, 2, 1, 16), torch.float32)
    short = native.attention(q[:97], k[:97], v[:97], 0.3)
    k2, v2 = (torch.cat([x[:97], 1e4 * x[97:]]) for x in (k, v))
    torch.testing.assert_close(native.attention(q, k2, v2, 0.3)[:97], short, rtol=1e-5, atol=1e-6)


def test_large_scores_neither_overflow_nor_vanish(native):
    """Scores up to several thousands: the largest weight is 1."""
    (q, k, v), dout = setting((260, 1, 1, 1, 16), torch.float32)
    out = native.attention(300 * q, k, v, 1.0)
    given = [float64(300 * q), float64(k), float64(v)]
    assert_close(out, by_definition(*given, 1.0), torch.bfloat16)
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


def test_other_shapes_are_refused(native):
    (q, k, v), dout = setting(SMALL, torch.float32)
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        native.attention(q[0], k, v, 1.0)
    with pytest.raises(ValueError, match=r"k must have shape \[9, 2, 2, 6\], not \[8, 2, 2, 6\]"):
        native.attention(q, k[1:], v, 1.0)
    with pytest.raises(ValueError, match=r"v must have shape \[9, 2, 2, 6\], not \[9, 2, 2, 4\]"):
        native.attention(q, k, v[..., :4], 1.0)
    with pytest.raises(ValueError, match="q has 3 heads, which must be a multiple of the 2 of k"):
        native.attention(q[:, :, :3], k, v, 1.0)
    with pytest.raises(ValueError, match="an even number up to 256 wide, not 5"):
        native.attention(q[..., :5], k[..., :5], v[..., :5], 1.0)
    with pytest.raises(ValueError, match="scale must be positive, not 0"):
        native.attention(q, k, v, 0.0)
    with pytest.raises(TypeError, match="k is Double, q is Float"):
        native.attention(q, k.double(), v, 1.0)
    with pytest.raises(TypeError, match="q must be float32, float64, bfloat16 or float16"):
        native.attention(*(x.int() for x in (q, k, v)), 1.0)
    backward = torch.ops.moe_parallel.attention_backward
    given = [x.detach() for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"logsumexp must have shape \[2, 4, 9\], not \[9, 2, 4\]"):
        backward(dout, *given, given[0], torch.zeros(9, 2, 4), 1.0)
    with pytest.raises(ValueError, match=r"dout must have shape \[9, 2, 4, 6\]"):
        backward(dout[1:], *given, given[0], torch.zeros(2, 4, 9), 1.0)
