"""RMSNorm compared with its formula in numpy, and its gradient under sequence parallelism."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_parallel.platform.norm import RMSNorm

WIDTH = 24


def _norm(sequence_parallel=False, eps=1e-5):
    norm = RMSNorm(SimpleNamespace(sequence_parallel=sequence_parallel), WIDTH, eps)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, WIDTH))
    return norm


def _in_numpy(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("eps", [1e-5, 0.5])
@pytest.mark.parametrize("shape", [(5, 2, WIDTH), (WIDTH,), (0, WIDTH)])
def test_equals_its_formula(shape, eps):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    y = _norm(eps=eps)(x)
    expected = _in_numpy(x.numpy(), np.linspace(0.5, 2.0, WIDTH), eps)
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=1e-6, atol=1e-6)


def test_bf16_loses_only_the_rounding_of_its_result():
    """Large entries overflow no statistic; bf16 statistics would have much larger errors."""
    x = (1e3 * torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))).bfloat16()
    norm = _norm().bfloat16()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    weight = norm.weight.detach().float().numpy()
    expected = _in_numpy(x.float().numpy(), weight, 1e-5)
    half_a_step = 2.0**-8  # of a number with 8 bits of significand
    error = np.abs(y.detach().float().numpy() - expected)
    assert (error <= 1.01 * half_a_step * np.abs(expected)).all()
