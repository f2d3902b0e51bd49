"""norm_topk with screening: FP8 finds the candidates, and their norms select among them."""

import numpy as np
import pytest
import torch

from moe_parallel.ops import fp8_norms as module
from moe_parallel.ops.fp8_norms import fp8_norms
from tests.ops.cases import DTYPES, assert_close, float64, gradients, random_tensor
from tests.oracles import fp8
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering

TOKENS, WIDTH, RANK = 200, 48, 16
SIZES = [(8, 2, 1), (8, 2, 4), (16, 1, 2), (64, 8, 2)]  # experts, k, screening


def setting(experts: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = random_tensor(TOKENS, WIDTH, dtype=dtype, device=device, seed=0)
    w = random_tensor(experts, WIDTH, RANK, dtype=dtype, device=device, seed=1)
    return x.requires_grad_(), w.requires_grad_()


def candidates(x, w, count, bias=0.0):
    """The experts with the largest norms in FP8, bool [T, E]."""
    screened = fp8.norms(float64(x), float64(w)) + bias
    chosen = np.zeros(screened.shape, dtype=bool)
    np.put_along_axis(chosen, oracle.topk(screened, count), True, axis=1)
    return chosen


def assert_close_in_fp8(actual: torch.Tensor, expected: np.ndarray) -> None:
    """The tensor cores of a GPU add products of FP8 in about 14 bits, not in fp32."""
    if actual.is_cuda:
        np.testing.assert_allclose(float64(actual), expected, rtol=0, atol=2**-12 * expected.max())
    else:
        assert_close(actual, expected, torch.float32)


def all_norms(x, w):
    return np.linalg.norm(np.einsum("td,edr->ter", float64(x), float64(w)), axis=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_in_fp8(device, dtype):
    x, w = setting(8, dtype, device)
    found = fp8_norms(x, w)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert_close_in_fp8(found, fp8.norms(float64(x), float64(w)))


def test_the_product_of_tensor_cores_is_the_emulated_one():
    """torch's product for the CPU accepts the same inputs as the product for a GPU."""
    x, w = (tensor.detach() for tensor in setting(8, torch.float32, "cpu"))
    x8, w8 = x.to(module.E4M3), w.transpose(1, 2).flatten(0, 1).to(module.E4M3)
    assert_close(module._on_tensor_cores(x8, w8), float64(module._emulated(x8, w8)), torch.float32)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_greatest_of_the_candidates_are_chosen(ops, device, size):
    experts, k, screening = size
    x, w = setting(experts, torch.float64, device)
    scores = ops.norm_topk(x, w, k, gradient="chosen", screening=screening)
    known, exact = candidates(x, w, k + screening), all_norms(x, w)
    found = scores.experts_TK.cpu().numpy()
    assert (found == oracle.topk(np.where(known, exact, -1.0), k)).all()

    unscreened = oracle.topk(exact, k)
    among = np.take_along_axis(known, unscreened, axis=1).all(1)
    assert (found == unscreened).all(1).tolist() == among.tolist()
    assert among.mean() > 0.9

    assert_close(scores.norms_TE[torch.from_numpy(known)], exact[known], torch.float64)
    screened = scores.norms_TE[torch.from_numpy(~known)]
    assert_close_in_fp8(screened, fp8.norms(float64(x), float64(w))[~known])


def test_too_few_candidates_miss_some(ops, device):
    """Otherwise the tests above would prove little: the ranking by FP8 does differ."""
    x, w = setting(64, torch.float64, device)
    scores = ops.norm_topk(x, w, 8, gradient="chosen", screening=1)
    found, exact = scores.experts_TK.cpu().numpy(), oracle.topk(all_norms(x, w), 8)
    assert 0 < (found != exact).any(1).sum() < TOKENS / 4


def test_a_bias_ranks_in_both(ops, device):
    x, w = setting(16, torch.float64, device)
    exact = all_norms(x, w)
    bias = np.linspace(-0.3, 0.3, 16) * exact.mean()
    scores = ops.norm_topk(x, w, 3, torch.from_numpy(bias).to(x), gradient="chosen", screening=2)
    known = candidates(x, w, 5, bias)
    wanted = oracle.topk(np.where(known, exact + bias, -np.inf), 3)
    assert (scores.experts_TK.cpu().numpy() == wanted).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keep", ["nothing", "chosen", "all"])
def test_gradients_are_those_of_the_chosen(ops, device, keep, dtype):
    x, w = setting(8, dtype, device)
    scores = ops.norm_topk(x, w, 2, keep=keep, gradient="chosen", screening=3)
    experts, of_x, of_w = scores.experts_TK.cpu().numpy(), float64(x), float64(w)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dnorms = random_tensor(TOKENS, 8, dtype=wide, device=device, seed=2)
    chosen = np.zeros(dnorms.shape)
    np.put_along_axis(chosen, experts, 1.0, axis=1)
    dx, dw = oracle.norms_gradient(float64(dnorms) * chosen, of_x, of_w)
    if keep == "nothing":
        assert scores.c_TKR is None
        found = gradients(scores.norms_TE, dnorms, x, w)
    else:
        c = np.einsum("td,tkdr->tkr", of_x, of_w[experts])
        assert_close(scores.c_TKR, c, dtype)
        dc = random_tensor(*c.shape, dtype=dtype, device=device, seed=3)
        outputs = [scores.norms_TE, scores.c_TKR]
        found = torch.autograd.grad(outputs, (x, w), [dnorms, dc])
        dx += np.einsum("tkr,tkdr->td", float64(dc), of_w[experts])
        for e in range(8):
            t, j = np.nonzero(experts == e)
            dw[e] += of_x[t].T @ float64(dc)[t, j]
    assert_close(found[0], dx, dtype)
    assert_close(found[1], dw, dtype)
