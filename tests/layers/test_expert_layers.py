"""Layers that dispatch tokens equal their per-token oracles, with every option."""

import functools
from dataclasses import replace

import numpy
import pytest
import torch

from moe_parallel.ops import extension
from tests.layers.cases import BUSY, CASES, DESPITE, IDLE, close, direction
from tests.layers.expected import (
    expected_choices,
    expected_output,
    expected_routing,
    expected_scores,
    expected_slopes,
    unchosen,
)
from tests.layers.single import EXPERTS, WIDTH, build, run, values
from tests.oracles import layers as oracle

BACKENDS = [
    "reference",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(
            not extension.is_built(), reason="the C++ extension is not built: make set-up"
        ),
    ),
]


@functools.cache
def expected(name: str):
    case = CASES[name]
    given = values(case)
    fixed = None
    if getattr(case.selection, "aoe_gradient", "full") == DESPITE["aoe_gradient"]:
        fixed = unchosen(expected_choices(case, expected_scores(case, given)))
    wanted = expected_slopes(case, given, direction(case), fixed)
    return expected_output(case, given), wanted


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_transcription(name, backend):
    case, given = CASES[name], values(CASES[name])
    output, gradients = run(build(case, given, torch.float64, backend), given, direction(case))
    expected_y, expected_slope = expected(name)
    # Norms are fp64 for fp64 layers; routers compute scores in fp32 for every type of layer.
    rounding = 1e-12 if case.autonomous else 1e-6
    close(output, expected_y, rounding, "output")
    assert gradients.keys() == expected_slope.keys()
    for key, slope in expected_slope.items():
        close(oracle.slopes(gradients[key]), slope, max(3 * rounding, 1e-7), key)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [
        "topk",
        "top1",
        "topk, drop and pad",
        "topk, balanced by bias",
        "topk, factorized",
        "sigmoid",
        "top_p",
        "expert_choice, softmax",
        "aoe, all experts",
        "aoe_top_p, all experts",
        "aoe, selected gradient",
        "aoe_expert_choice, raw",
    ],
)
def test_bf16_is_close_to_fp32(name, backend):
    case = CASES[name]
    rounded = {
        key: torch.from_numpy(value).bfloat16().double().numpy()
        for key, value in values(case).items()
    }
    weights = torch.from_numpy(direction(case)).bfloat16().double().numpy()
    output, gradients = run(build(case, rounded, torch.bfloat16, backend), rounded, weights)
    exact, exact_gradients = run(build(case, rounded, torch.float32, backend), rounded, weights)
    close(output, exact, 2e-2, "output")
    for key, gradient in exact_gradients.items():
        close(gradients[key], gradient, 3e-2, key)


def test_cases_are_what_their_names_say():
    for name, case in CASES.items():
        routing, kept = expected_routing(case, values(case))
        chosen = [expert for row in routing.experts for expert in row]
        dropped = sum(row.count(None) for row in kept.experts)
        assert (case.bias == IDLE) <= (0 not in chosen), name
        assert (case.bias == BUSY) == (set(chosen) == {2}), name
        assert ("drop" in name) == (dropped > 0), name
        sizes = {len(row) for row in routing.experts}
        assert ("one expert" in name) <= (sizes == {1} or case.bias == BUSY), name
        assert ("all experts" in name or "all tokens" in name) <= (sizes == {EXPERTS}), name
        assert (name in ("top_p", "aoe_top_p")) <= (len(sizes) > 1), name
        if case.balance is not None:
            unbiased = expected_choices(replace(case, balance=None), routing.scores)
            assert unbiased.experts != routing.experts, name


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
