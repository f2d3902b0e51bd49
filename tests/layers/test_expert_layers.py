"""The routed and the autonomous layer equal their per-token transcriptions."""

import functools
from dataclasses import replace

import numpy
import pytest
import torch

from moe_parallel.config import AoESelection, TopKSelection
from moe_parallel.ops import extension
from tests.layers.single import (
    EXPERTS,
    WIDTH,
    Case,
    build,
    expected_gradients,
    expected_output,
    expected_routing,
    run,
    values,
)
from tests.oracles import layers as oracle

BACKENDS = [
    "reference",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(
            not extension.is_built(), reason="the C++ extension is not built: pip install -e ."
        ),
    ),
]


def topk(k: int = 2, aux: float = 0.3, z: float = 0.1) -> TopKSelection:
    return TopKSelection(moe_router_topk=k, moe_aux_loss_coeff=aux, moe_z_loss_coeff=z)


def aoe(k: int = 2, aux: float = 0.3) -> AoESelection:
    return AoESelection(moe_router_topk=k, moe_aux_loss_coeff=aux, aoe_low_rank_size=2)


IDLE = (-8.0, 0.0, 0.0, 0.0)  # nobody chooses the first expert
BUSY = (0.0, 0.0, 2.5, 0.0)  # everybody chooses the third

CASES = {
    "topk": Case(topk()),
    "topk, two sequences": Case(topk(), sequences=2, tokens=6),
    "topk, no auxiliary losses": Case(topk(aux=0.0, z=0.0)),
    "topk, aux loss only": Case(topk(z=0.0)),
    "topk, z-loss only": Case(topk(aux=0.0)),
    "topk, one token": Case(topk(), tokens=1),
    "topk, all experts": Case(topk(k=EXPERTS)),
    "top1": Case(topk(k=1)),
    "top1, all to one expert": Case(topk(k=1), bias=BUSY),
    "topk, an idle expert": Case(topk(), bias=IDLE),
    "topk, drop by probability": Case(topk(), capacity_factor=0.6, policy="probs"),
    "topk, drop by position": Case(topk(), capacity_factor=0.6, policy="position"),
    "topk, drop and pad": Case(topk(), capacity_factor=0.6, policy="probs", pad=True),
    "top1, drop and pad": Case(topk(k=1), capacity_factor=0.5, bias=BUSY, pad=True),
    "aoe": Case(aoe()),
    "aoe, two sequences": Case(aoe(), sequences=2, tokens=6),
    "aoe, no auxiliary loss": Case(aoe(aux=0.0)),
    "aoe, one token": Case(aoe(), tokens=1),
    "aoe, all experts": Case(aoe(k=EXPERTS)),
    "aoe, one expert": Case(aoe(k=1)),
    "aoe, all to one expert": Case(aoe(k=1), bias=BUSY),
    "aoe, an idle expert": Case(aoe(), bias=IDLE),
    "aoe, drop by probability": Case(aoe(), capacity_factor=0.6, policy="probs"),
    "aoe, drop by position": Case(aoe(), capacity_factor=0.6, policy="position"),
    "aoe, drop and pad": Case(aoe(), capacity_factor=0.6, policy="position", pad=True),
}


def direction(case: Case) -> numpy.ndarray:
    """Weights of the outputs in the scalar that is differentiated."""
    shape = (case.tokens // case.sequences, case.sequences, WIDTH)
    return numpy.random.default_rng(1).normal(size=shape)


@functools.cache
def expected(name: str):
    case = CASES[name]
    given = values(case)
    return expected_output(case, given), expected_gradients(case, given, direction(case))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_transcription(name, backend):
    case, given = CASES[name], values(CASES[name])
    output, gradients = run(build(case, given, torch.float64, backend), given, direction(case))
    expected_y, expected_gradient = expected(name)
    # AoE runs in fp64 throughout; routers score in fp32, whatever the type of the layer.
    rounding = 1e-12 if case.autonomous else 1e-6
    _close(output, expected_y, rounding, "output")
    assert gradients.keys() == expected_gradient.keys()
    for key, gradient in expected_gradient.items():
        _close(gradients[key], gradient, max(3 * rounding, 1e-7), key)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["topk", "top1", "topk, drop and pad", "aoe", "aoe, drop and pad"])
def test_fp32(name, backend):
    case, given = CASES[name], values(CASES[name])
    output, gradients = run(build(case, given, torch.float32, backend), given, direction(case))
    expected_y, expected_gradient = expected(name)
    _close(output, expected_y, 2e-6, "output")
    for key, gradient in expected_gradient.items():
        _close(gradients[key], gradient, 1e-5, key)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["topk", "top1", "topk, drop and pad", "aoe, all experts"])
def test_bf16_is_close_to_fp32(name, backend):
    case = CASES[name]
    rounded = {
        key: torch.from_numpy(value).bfloat16().double().numpy()
        for key, value in values(case).items()
    }
    weights = torch.from_numpy(direction(case)).bfloat16().double().numpy()
    output, gradients = run(build(case, rounded, torch.bfloat16, backend), rounded, weights)
    exact, exact_gradients = run(build(case, rounded, torch.float32, backend), rounded, weights)
    _close(output, exact, 2e-2, "output")
    for key, gradient in exact_gradients.items():
        _close(gradients[key], gradient, 3e-2, key)


def test_cases_are_what_their_names_say():
    for name, case in CASES.items():
        routing, kept = expected_routing(case, values(case))
        chosen = [expert for row in routing.experts for expert in row]
        dropped = sum(row.count(None) for row in kept.experts)
        assert (case.bias == IDLE) <= (0 not in chosen), name
        assert (case.bias == BUSY) == (set(chosen) == {2}), name
        assert ("drop" in name) == (dropped > 0), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["topk, an idle expert", "aoe, an idle expert"])
def test_an_idle_expert_learns_nothing_of_its_own(name, backend):
    case, given = CASES[name], values(CASES[name])
    _, gradients = run(build(case, given, torch.float32, backend), given, direction(case))
    for key, gradient in gradients.items():
        if key.startswith("experts."):
            assert (gradient[0] == 0).all() and (gradient[1:] != 0).all(), key


def test_without_auxiliary_loss_only_the_chosen_have_a_gradient_of_norms():
    case = Case(aoe(aux=0.0), tokens=1)
    given = values(case)
    _, gradients = run(build(case, given, torch.float64, "reference"), given, direction(case))
    chosen = set(expected_routing(case, given)[0].experts[0])
    moved = {e for e, gradient in enumerate(gradients["w_down_EDR"]) if (gradient != 0).any()}
    assert moved == chosen


@pytest.mark.parametrize("name", ["topk", "aoe"])
def test_auxiliary_losses_are_for_training(name):
    given = values(CASES[name])
    layer = build(CASES[name], given, torch.float64, "reference").eval()
    without = topk(aux=0.0, z=0.0) if name == "topk" else aoe(aux=0.0)
    quiet = build(replace(CASES[name], selection=without), given, torch.float64, "reference")
    _, evaluated = run(layer, given, direction(CASES[name]))
    _, expected_gradient = run(quiet, given, direction(CASES[name]))
    for key, gradient in expected_gradient.items():
        numpy.testing.assert_array_equal(evaluated[key], gradient, err_msg=key)


@pytest.mark.parametrize("name", ["topk", "aoe"])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capacity_that_drops_nothing_changes_nothing(name, policy, pad, backend):
    free = CASES[name]
    limited = replace(free, capacity_factor=float(EXPERTS), policy=policy, pad=pad)
    given = values(free)
    runs = [
        run(build(case, given, torch.float32, backend), given, direction(free))
        for case in (free, limited)
    ]
    numpy.testing.assert_array_equal(runs[1][0], runs[0][0])
    for key, gradient in runs[0][1].items():
        if pad:  # sums over more rows, in another order
            _close(runs[1][1][key], gradient, 1e-6, key)
        else:
            numpy.testing.assert_array_equal(runs[1][1][key], gradient, err_msg=key)


@pytest.mark.parametrize("name", ["topk, drop by probability", "aoe, drop by position", "aoe"])
def test_statistics(name):
    case, given = CASES[name], values(CASES[name])
    layer = build(case, given, torch.float64, "reference")
    run(layer, given, direction(case))
    (summary,) = layer.context.statistics.training.summaries()
    routing, kept = expected_routing(case, given)
    chosen = [expert for row in routing.experts for expert in row]
    assert summary["tokens_per_expert"] == [chosen.count(e) for e in range(EXPERTS)]
    assert summary["tokens_dropped"] == sum(row.count(None) for row in kept.experts)
    if case.autonomous:
        means = oracle.norm_scores(given["x"].reshape(-1, WIDTH), given["w_down_EDR"]).mean(0)
        numpy.testing.assert_allclose(summary["norm_per_expert"], means, rtol=1e-10)
    else:
        assert "norm_per_expert" not in summary


def _close(found, wanted, tolerance: float, name: str) -> None:
    """Equal up to `tolerance` times the greatest value."""
    assert found.shape == wanted.shape, name
    error = abs(found - wanted).max()
    limit = tolerance * max(abs(wanted).max(), 1e-3)
    assert error <= limit, f"{name} is off by {error:.2e}, more than {limit:.2e}"
