"""`--aoe-gradient selected`: exact if unchosen experts have no gradient, else without theirs."""

from dataclasses import replace

import numpy
import pytest
import torch

from moe_parallel.layers import AutonomousLayer
from moe_parallel.layers.dispatched import SplitTokens
from tests.layers.cases import (
    BALANCE,
    BIASED,
    DESPITE,
    SELECTED,
    aoe,
    aoe_expert_choice,
    aoe_top_p,
    close,
    direction,
)
from tests.layers.expected import expected_choices, expected_scores, expected_slopes, unchosen
from tests.layers.single import Case, build, run, values
from tests.oracles.layers import slopes

EXACT = {
    "aoe": Case(aoe(aux=0.0)),
    "aoe, one expert": Case(aoe(k=1, aux=0.0)),
    "aoe, drop": Case(aoe(aux=0.0), capacity_factor=0.6),
    "aoe, bias": Case(aoe(aux=0.0, **BIASED), balance=BALANCE),
    "aoe_expert_choice": Case(aoe_expert_choice()),
}


def gradients_of(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, numpy.ndarray]:
    given = values(case)
    return run(build(case, given, dtype, "reference"), given, direction(case))[1]


def as_option(case: Case, gradient: dict[str, str]) -> Case:
    return replace(case, selection=replace(case.selection, **gradient))


@pytest.mark.parametrize("name", EXACT)
def test_without_losses_it_equals_the_full_gradient(name):
    full, selected = EXACT[name], as_option(EXACT[name], SELECTED)
    given = values(full)
    layer = build(selected, given, torch.float64, "reference")
    assert isinstance(layer, AutonomousLayer) and layer.gradient == "chosen"
    for dtype, rounding in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        found = gradients_of(selected, dtype)
        for key, gradient in gradients_of(full, dtype).items():
            close(found[key], gradient, rounding, key)


JOINS = {
    "aoe": (EXACT["aoe"], SELECTED, True),
    "aoe, bias": (EXACT["aoe, bias"], SELECTED, True),
    "a dropped choice has no row": (EXACT["aoe, drop"], SELECTED, False),
    "a loss needs the norms": (Case(aoe()), DESPITE, False),
    "full": (EXACT["aoe"], {}, False),
}


@pytest.mark.parametrize("name", JOINS)
def test_when_the_experts_differentiate_the_norms(name):
    case, gradient, joins = JOINS[name]
    layer = build(as_option(case, gradient), values(case), torch.float64, "reference")
    tokens = SplitTokens(1, layer.context.groups.tp, layer=1)
    choices = layer.choose(torch.from_numpy(values(case)["x"]).flatten(0, 1), tokens)
    assert (choices.norms_TK is not None) == joins
    assert choices.probs_TK.requires_grad != joins


LOSSES = {
    "load balancing": aoe(),
    "load balancing of sequences": aoe(moe_router_load_balancing_type="seq_aux_loss"),
    "top-p, load balancing and entropy": aoe_top_p(p=0.4),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_it_drops_goes_through_the_norms_of_the_unchosen(name):
    """With probs over the chosen, only losses reach the others; top-p's are a softmax over all."""
    case = Case(LOSSES[name], sequences=2, tokens=6)
    given = values(case)
    full, selected = gradients_of(case), gradients_of(as_option(case, DESPITE))
    idle = unchosen(expected_choices(case, expected_scores(case, given)))
    by_unchosen = expected_slopes(case, given, direction(case), fixed=~idle)
    by_no_score = expected_slopes(case, given, direction(case), fixed=idle | ~idle)
    for key in full:
        lost = slopes(full[key] - selected[key])
        close(lost, by_unchosen[key] - by_no_score[key], 1e-6, key)
        if key.startswith("experts."):
            assert (full[key] == selected[key]).all()
    assert abs(full["w_down_EDR"] - selected["w_down_EDR"]).max() > 1e-3
