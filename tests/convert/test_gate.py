"""W_g made low-rank: exact at full rank; the ranking never becomes worse; values stay bounded."""

import numpy
import pytest
import torch

from moe_parallel.convert.gate import GateOptions, convert_gate

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


OPTIONS = [
    GateOptions(rank=5),
    GateOptions(rank=5, ranking_columns=1),
    GateOptions(rank=5, weighted=False),
    GateOptions(rank=5, ranking_columns=0),
    GateOptions(rank=5, ranking_columns=0, weighted=False),
    GateOptions(rank=5, ranking_columns=5, condition=3.0),
]


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_a_fit_never_costs_agreement(options, mean):
    for seed in range(3):
        w_gate, w_router, x = problem(seed, mean)
        gate = convert_gate(w_gate, w_router, x, K, options)
        before = routing_overlap(w_router, x, gate.before.columns_EDR)
        assert routing_overlap(w_router, x, gate.factors.columns_EDR) >= before - 1e-12


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_full_rank_is_exact(options):
    w_gate, w_router, x = problem(0, 3.0)
    options = GateOptions(D, options.weighted, options.ranking_columns, options.condition)
    gate = convert_gate(w_gate, w_router, x, K, options)
    product = gate.factors.columns_EDR @ gate.factors.rows_ERF
    numpy.testing.assert_allclose(product, w_gate, rtol=1e-6, atol=1e-8)


def test_activations_with_a_side_keep_the_router():
    """At any rank: a separate column contains the direction by which the norms rank."""
    for seed in range(3):
        w_gate, w_router, x = problem(seed, 4.0)
        gate = convert_gate(w_gate, w_router, x, K, GateOptions(rank=4, condition=50.0))
        assert gate.ranking == "columns"
        assert routing_overlap(w_router, x, gate.factors.columns_EDR) > 0.95


def test_the_condition_is_bounded():
    w_gate, w_router, x = problem(0, 4.0)
    for condition in (5.0, 40.0):
        gate = convert_gate(w_gate, w_router, x, K, GateOptions(5, condition=condition))
        assert gate.ranking == "columns"
        assert 1 < gate.condition <= condition * (1 + 1e-9)


def test_experts_without_a_gate_stay_finite():
    w_gate, w_router, x = problem(0, 0.0)
    w_gate[1] = 0
    for columns in (0, 2):
        gate = convert_gate(w_gate, w_router, x, K, GateOptions(5, ranking_columns=columns))
        assert torch.isfinite(gate.factors.columns_EDR).all()
        assert torch.isfinite(gate.factors.rows_ERF).all()
        product = gate.factors.columns_EDR[1] @ gate.factors.rows_ERF[1]
        numpy.testing.assert_allclose(product, 0, atol=1e-9)
