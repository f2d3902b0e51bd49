"""Routing-Free MoE: its loss by hand, and what its threshold and the size of the norms do."""

from dataclasses import replace

import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.layers.system import system_of
from moe_parallel.selection import rules
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems import RoutingFreeSelection
from moe_parallel.systems.routing_free.rule import routing_free_loss
from moe_parallel.systems.threshold.rule import Threshold
from tests.layers.cases import direction, routing_free
from tests.layers.single import Case, build, run, values

NORMS = [[2.0, 0.0], [1.0, 3.0]]


def choices_of(norms_TE: torch.Tensor) -> Choices:
    return Threshold(rules.raw_value, level=0.5, bias_E=torch.zeros(2))(norms_TE, Tokens(1))


@pytest.mark.parametrize(("expert_share", "expected"), [(1.0, 1.125), (0.0, 1.25), (0.5, 1.1875)])
def test_the_loss_by_hand(expert_share: float, expected: float) -> None:
    """Of the tokens 1 and .5 chose the experts, with mean values 1.5 and 1.5: L_EB.

    The tokens chose .5 and 1 of the experts, with mean values 1 and 2: L_TB.
    """
    loss = routing_free_loss(choices_of(torch.tensor(NORMS)), Tokens(1), expert_share)
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("gate", [rules.raw_value, rules.softmax_of_chosen])
def test_what_is_not_chosen_has_no_gradient_and_does_not_count(gate: rules.Gate) -> None:
    """The value 0.4 is not above 0.5. The loss is of values, whatever weighs the outputs."""
    norms_TE = torch.tensor([[2.0, 0.4], [1.0, 3.0]], requires_grad=True)
    rule = Threshold(gate, level=0.5, bias_E=torch.zeros(2))
    loss = routing_free_loss(rule(norms_TE, Tokens(1)), Tokens(1), 0.5)
    assert loss.item() == pytest.approx(1.1875)
    loss.backward()
    assert norms_TE.grad is not None
    assert norms_TE.grad[0, 1] == 0 and (norms_TE.grad > 0).sum() == 3


def test_what_follows_from_the_size_of_the_model_and_the_run() -> None:
    options = {"expert_selection": "routing_free", "aoe_low_rank_size": 32, "hidden_size": 512}
    options |= {"num_experts": 8, "num_attention_heads": 8}
    config = make_config(options | {"train_iters": 200})
    assert config.selection.theta(512, 0.02) == pytest.approx(1.0, rel=0.01)  # the paper's
    assert config.selection.initial_coefficient(200) == pytest.approx(1e-3 * 1.02**-10)
    assert config.selection.initial_coefficient(10**6) == 1e-10
    (note,) = config.notes
    assert "threshold of Routing-Free MoE is 0.9984" in note and "0.00082 in a run of 200" in note
    given = replace(config.selection, routing_free_threshold=0.2, routing_free_coeff_init=0.5)
    assert (given.theta(512, 0.02), given.initial_coefficient(200)) == (0.2, 0.5)


def test_the_coefficient_grows_by_eta_above_the_target_and_stays_at_it() -> None:
    """2 of 8 experts are a density of 1/4, and 4 of 8 one of 1/2."""
    selection = RoutingFreeSelection(routing_free_coeff_init=0.1)
    controller = system_of(selection).controller(selection, 8, 200)
    assert controller is not None
    for choices, expected in ((400, 0.102), (200, 0.102), (199, 0.1)):
        controller.move(torch.tensor([choices, 100], dtype=torch.float64))
        assert controller.setting.item() == pytest.approx(expected)


def test_the_cutoffs_that_are_logged_are_those_that_norms_exceed() -> None:
    case = Case(routing_free(theta=2.0))
    given = values(case)
    given["b_E"][:] = 0.5, 0.0, -0.25, 1.0
    layer = build(case, given, torch.float64, "reference")
    run(layer, given, direction(case))
    (summary,) = layer.context.statistics.training.summaries()
    assert summary["cutoff_per_expert"] == pytest.approx([2.5, 2.0, 1.75, 3.0])
