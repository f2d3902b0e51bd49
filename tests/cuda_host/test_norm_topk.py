"""Norms, selection and copies of the chosen C in one kernel: per token a warp, or a block."""

import ctypes
from ctypes import c_int, c_int64, c_void_p

import numpy as np
import pytest

from tests.cuda_host.emulation import structure

pytestmark = pytest.mark.full

FLOAT64 = 1  # ScalarType in csrc/scalar_type.h

ScoreTokens = structure(
    type=c_int,
    c_TER=c_void_p,
    bias=c_void_p,
    norms=c_void_p,
    experts=c_void_p,
    c_TKR=c_void_p,
    tokens=c_int64,
    num_experts=c_int64,
    rank=c_int64,
    k=c_int64,
    row_bytes=c_int64,
    squares=c_void_p,
)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "tokens, num_experts, rank, k",
    [(1, 1, 1, 1), (9, 8, 4, 2), (20, 8, 200, 8), (3, 33, 7, 5), (2, 64, 256, 8), (2, 300, 2, 20)],
)
def test_equals_sorting(kernels, tokens, num_experts, rank, k, has_bias):
    rng = np.random.default_rng(0)
    c, bias = rng.normal(size=(tokens, num_experts, rank)), rng.normal(size=num_experts)
    c[:, num_experts // 2] = c[:, 0]  # equal norms are ranked by index
    bias[num_experts // 2] = bias[0]
    norms, experts = np.zeros((tokens, num_experts)), np.full((tokens, k), -7)
    c_TKR = np.zeros((tokens, k, rank))
    task = ScoreTokens(
        type=FLOAT64,
        c_TER=c.ctypes.data,
        bias=bias.ctypes.data if has_bias else None,
        norms=norms.ctypes.data,
        experts=experts.ctypes.data,
        c_TKR=c_TKR.ctypes.data,
        tokens=tokens,
        num_experts=num_experts,
        rank=rank,
        k=k,
        row_bytes=8 * rank,
    )
    kernels.score_tokens(ctypes.byref(task))
    np.testing.assert_allclose(norms, np.linalg.norm(c, axis=2), rtol=1e-13)
    ranks = norms + (bias if has_bias else 0)
    wanted = np.argsort(-ranks, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(experts, wanted)
    np.testing.assert_array_equal(c_TKR, np.take_along_axis(c, wanted[:, :, None], axis=1))
