"""Operators on elements and rows at the edges: infinities, zeros, other dtypes, what is kept."""

import numpy as np
import pytest
import torch

from tests.ops.cases import DTYPES, assert_close, float64, gradients, random_tensor
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering


def test_swiglu_far_from_zero(ops, device):
    """exp must neither overflow to NaN nor stop before the limits."""
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4]], device=device)
    h = ops.swiglu(gate.requires_grad_(), torch.ones_like(gate))
    wanted = oracle.swiglu(float64(gate), np.ones((1, 7)), np.ones(1))
    np.testing.assert_allclose(float64(h), wanted, rtol=1e-6, atol=1e-30)
    (dgate,) = gradients(h, torch.ones_like(h), gate)
    np.testing.assert_allclose(float64(dgate), [[0, 0, 0, 0.5, 1, 1, 1]], atol=1e-6)


def test_swiglu_of_what_is_not_finite(ops, device):
    gate = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0] * 5], device=device)
    up = torch.ones_like(gate)
    up[0, 3] = torch.nan
    h = ops.swiglu(gate, up)[0]
    assert h[0].isnan() and h[1] == torch.inf and h[3].isnan() and h[7].isfinite()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_experts_merge_to_themselves_to_the_bit(ops, device, dtype):
    """If the weights sum to 1: a model whose dense layers became its experts computes the same."""
    one = random_tensor(1, 31, 65, dtype=dtype, device=device, seed=0)
    weights = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64, device=device)
    assert torch.equal(ops.expert_merge(weights, one.expand(3, -1, -1)), one)


def test_the_norm_of_heads_in_one_tensor_with_others(ops, device):
    """The queries of attention are a part of a wider tensor."""
    whole = random_tensor(3, 2, 4, 30, dtype=torch.float64, device=device, seed=0)
    weight = random_tensor(10, dtype=torch.float64, device=device, seed=1)
    x = whole[..., 10:20]
    y = ops.rms_norm(x, weight, 1e-5)
    assert y.shape == x.shape
    wanted = oracle.rms_norm(float64(x).reshape(24, 10), float64(weight), 1e-5)
    assert_close(y.reshape(24, 10), wanted, torch.float64)


def test_norms_with_weights_of_a_wider_dtype(ops, device):
    x, dy = (random_tensor(5, 37, dtype=torch.bfloat16, device=device, seed=n) for n in (0, 1))
    weight = random_tensor(37, dtype=torch.float32, device=device, seed=2).requires_grad_()
    y = ops.rms_norm(x.requires_grad_(), weight, 1e-5)
    dweight = gradients(y, dy, x, weight)[1]
    assert (y.dtype, dweight.dtype) == (torch.bfloat16, torch.float32)
    assert_close(y, oracle.rms_norm(float64(x), float64(weight), 1e-5), torch.bfloat16)
    _, wanted = oracle.rms_norm_gradient(float64(dy), float64(x), float64(weight), 1e-5)
    assert_close(dweight, wanted, torch.float32)


def test_the_norm_of_zeros(ops, device):
    x = torch.zeros(2, 8, dtype=torch.float64, device=device, requires_grad=True)
    y = ops.rms_norm(x, torch.full_like(x[0], 2.0), 0.25)
    assert (y == 0).all()
    (dx,) = gradients(y, torch.ones_like(y), x)
    assert_close(dx, np.full((2, 8), 4.0), torch.float64)  # weight / sqrt(eps)


def test_a_norm_keeps_x_and_a_number_per_row(native):
    x = random_tensor(50, 64, dtype=torch.bfloat16, device="cpu", seed=0).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        native.rms_norm(x, torch.ones(64, dtype=x.dtype, requires_grad=True), 1e-5)
    assert {(tuple(t.shape), t.dtype) for t in kept} == {
        ((50, 64), torch.bfloat16),
        ((64,), torch.bfloat16),
        ((50,), torch.float32),
    }


# The softmax of the head's loss


def logits_and_labels(rows: int, width: int, dtype: torch.dtype, device: str):
    """The last label of several is not one of the columns."""
    logits = 4 * random_tensor(rows, width, dtype=dtype, device=device, seed=0)
    labels = torch.arange(3, 3 + 5 * rows, 5, device=device) % width
    labels[1:][-1:] = width
    return logits, labels


def one_hot(labels: torch.Tensor, width: int) -> np.ndarray:
    return labels.cpu().numpy()[:, None] == np.arange(width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 64), (9, 131), (0, 4), (130, 33)], ids=str)
def test_softmax_equals_the_oracle(ops, device, shape, dtype):
    logits, labels = logits_and_labels(*shape, dtype, device)
    given = float64(logits).copy()
    wide = torch.promote_types(dtype, torch.float32)
    most, sums = ops.softmax_sums(logits)
    assert most.dtype == sums.dtype == wide
    assert (float64(most) == given.max(1, initial=-np.inf)).all()
    assert_close(sums, np.exp(given).sum(1) / np.exp(float64(most)), wide)
    assert (float64(logits) == given).all()
    ops.softmax_gradient(logits, labels, most, sums)
    assert_close(logits, oracle.softmax(given) - one_hot(labels, shape[1]), dtype)


@pytest.mark.parametrize("width", [2, 19, 64])
def test_a_softmax_by_hand(ops, device, width):
    """Weights 1 and 3; all other logits are so small that they have none."""
    logits = torch.full((2, width), -1e4, device=device)
    logits[:, 0], logits[:, -1] = -1000.0, -1000.0 + float(np.log(3))
    most, sums = ops.softmax_sums(logits)
    torch.testing.assert_close(sums, torch.full((2,), 4 / 3, device=device), rtol=1e-4, atol=0)
    ops.softmax_gradient(logits, torch.tensor([width - 1, -1], device=device), most, sums)
    wanted = torch.zeros(2, width, device=device)
    wanted[:, 0] = 0.25
    wanted[0, -1], wanted[1, -1] = -0.25, 0.75
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-30)


def test_softmax_of_what_is_large_or_not_a_number(ops, device):
    logits = torch.tensor([[3e38, -3e38, 3e38]] + [[0.0, torch.nan, 0]], device=device)
    most, sums = ops.softmax_sums(logits)
    assert sums[0] == 2
    ops.softmax_gradient(logits, torch.tensor([0, 0], device=device), most, sums)
    assert logits[0, 0] == -0.5 and logits[0, 2] == 0.5 and 0 <= logits[0, 1] < 1e-30
    assert logits[1].isnan().all()


def test_the_gradient_of_softmax_in_bf16_is_rounded_once(native):
    logits, labels = logits_and_labels(50, 70, torch.bfloat16, "cpu")
    p = oracle.softmax(float64(logits)) - one_hot(labels, 70)
    native.softmax_gradient(logits, labels, *native.softmax_sums(logits))
    assert (np.abs(float64(logits) - p) <= np.abs(p) * 2.0**-8 * 1.001).all()


def test_softmax_with_gaps_and_threads(native, two_threads):
    wide, labels = logits_and_labels(300, 518, torch.float32, "cpu")
    results = []
    for threads, logits in ((2, wide[:, 5:]), (1, wide[:, 5:].clone())):
        torch.set_num_threads(threads)
        most, sums = native.softmax_sums(logits)
        logits = logits.clone()
        native.softmax_gradient(logits, labels, most, sums)
        results.append((most, sums, logits))
    for two, one in zip(*results, strict=True):
        assert torch.equal(two, one)
