"""W_g made low-rank: exact at full rank; the ranking never becomes worse; values stay bounded."""

import numpy
import pytest
import torch

from moe_parallel.convert.gate import CONDITION, convert_gate

T, E, D, F, K = 500, 4, 8, 10, 2


def problem(seed, mean):
    """W_g, a router, and activations around `mean` along their first axis."""
    rng = numpy.random.default_rng(seed)
    x = rng.normal(size=(T, D)) * numpy.linspace(0.3, 1.5, D)
    x[:, 0] += mean
    w_gate = rng.normal(size=(E, D, F)) * numpy.exp(rng.normal(size=(E, 1, 1)))
    return (
        torch.from_numpy(w_gate),
        torch.from_numpy(0.4 * rng.normal(size=(E, D))),
        torch.from_numpy(x),
    )


def routing_overlap(w_router, x, columns):
    """The share of the K experts of largest logit whose norm is among the K largest; by loops."""
    same = 0
    for row in x.numpy():
        logits = [row @ w for w in w_router.numpy()]
        norms = [numpy.sqrt(((row @ c) ** 2).sum()) for c in columns.numpy()]
        same += len(set(numpy.argsort(logits)[-K:]) & set(numpy.argsort(norms)[-K:]))
    return same / (K * len(x))


@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_a_fit_never_costs_agreement(mean):
    """Where activations have a side, one column has the direction by which the norms rank."""
    for seed in range(3):
        w_gate, w_router, x = problem(seed, mean)
        plain, factors = convert_gate(w_gate, w_router, x, K, 5)
        before = routing_overlap(w_router, x, plain.columns_EDR)
        assert routing_overlap(w_router, x, factors.columns_EDR) >= max(before, 0.95 * (mean > 0))


@pytest.mark.parametrize("rank", [1, 3, D])
def test_full_rank_is_exact_and_the_ratio_of_lengths_bounded(rank):
    w_gate, w_router, x = problem(0, 3.0)
    plain, factors = convert_gate(w_gate, w_router, x, K, rank)
    if rank == D:
        for each in (plain, factors):
            product = each.columns_EDR @ each.rows_ERF
            numpy.testing.assert_allclose(product, w_gate, rtol=1e-6, atol=1e-8)
    root = torch.linalg.cholesky(x.T @ x / T).mT
    lengths = (root @ factors.columns_EDR).norm(dim=1)
    assert (lengths.amax(1) / lengths.amin(1)).max() <= CONDITION * 1.01


def test_experts_without_a_gate_stay_finite():
    w_gate, w_router, x = problem(0, 0.0)
    w_gate[1] = 0
    _, factors = convert_gate(w_gate, w_router, x, K, 5)
    assert torch.isfinite(factors.columns_EDR).all()
    assert torch.isfinite(factors.rows_ERF).all()
    numpy.testing.assert_allclose(factors.columns_EDR[1] @ factors.rows_ERF[1], 0, atol=1e-9)
