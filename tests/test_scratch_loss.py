"""An auxiliary loss of a package of its own: it is trained on and logged."""

import sys
from pathlib import Path
from typing import Any

import pytest

from moe_parallel.telemetry.sinks import scalars
from tests.distributed import run_distributed
from tests.training.tiny_run import Layout, TinyRun

PACKAGE = '''
"""Drawn: top-K with a loss that draws the router's logits toward 0. Near: AoE with that loss."""

from dataclasses import dataclass

from moe_parallel.balancing.losses import RoutingLoss
from moe_parallel.config.option import option
from moe_parallel.layers import AutonomousLayer, RoutedLayer, System, register
from moe_parallel.systems import AoESelection, TopKSelection
from moe_parallel.systems.aoe import rule as aoe
from moe_parallel.systems.topk import rule as topk
from moe_parallel.telemetry.metrics import register_loss

DRAWN = register_loss("drawn_loss")


@dataclass(frozen=True)
class DrawnSelection(TopKSelection, system="drawn"):
    drawn_loss_coeff: float = option(1.0, "coefficient of mean(logits^2); 0: off", least=0)


@dataclass(frozen=True)
class NearSelection(AoESelection, system="near"):
    near_loss_coeff: float = option(1.0, "coefficient of mean(norms^2); 0: off", least=0)


def squares(choices, tokens):
    return choices.scores_TE.square().mean()


def drawn(selection, context):
    return RoutingLoss(DRAWN, selection.drawn_loss_coeff, squares)


def near(selection, context):
    return RoutingLoss(DRAWN, selection.near_loss_coeff, squares)


register(System(DrawnSelection, RoutedLayer, topk.rules, own_losses=(drawn,)))
register(System(NearSelection, AutonomousLayer, aoe.rules, own_losses=(near,)))
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "drawn_system.py").write_text(PACKAGE)
    return folder


def _losses(folder: Path, coefficient: float) -> list[dict[str, Any]]:
    """The layers in the record of the fifth step."""
    options = {"expert_selection": "drawn_system:drawn", "drawn_loss_coeff": coefficient}
    run = TinyRun(Layout(), folder, options=options)
    run.steps(4)
    run.engine.statistics.training.clear()
    run.steps(1)
    layers = run.engine.statistics.training.reduced([None]).summaries()
    run.close()
    return layers


def _train(package: Path, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    sys.path.insert(0, str(package))
    import drawn_system

    from moe_parallel import AoE
    from moe_parallel.errors import InputError

    with pytest.raises(InputError) as refused:
        near = drawn_system.NearSelection(aoe_gradient="selected", moe_aux_loss_coeff=0.0)
        AoE(8, 4, selection=near, backend="reference")
    return _losses(folder, 100.0), _losses(folder, 1e-9), str(refused.value)


def test_it_is_trained_on_and_logged(package: Path, tmp_path: Path) -> None:
    ((drawn, not_drawn, refused),) = run_distributed(1, _train, package, tmp_path)
    assert len(drawn) == 3
    for layer, other in zip(drawn, not_drawn, strict=True):
        assert 0 < layer["drawn_loss"] < other["drawn_loss"]
    # The norms of experts that are not chosen have a gradient then, whatever the options are.
    assert refused.startswith("--aoe-gradient is selected, but drawn_loss has a gradient through")


def _name_losses() -> tuple[dict[str, float], list[str]]:
    from moe_parallel.balancing.losses import RoutingLoss
    from moe_parallel.telemetry.metrics import register_loss

    register_loss("new_loss")
    layer = {"layer": 1, "tokens_per_expert": [1, 2], "new_loss": 0.25, "ent_load": 0.0}
    layer |= {"ent_conf": 0.0, "max_minus_min_load": 0.0, "tokens_dropped": 0}
    messages = []
    for action in (
        lambda: RoutingLoss("unknown_loss", 1.0, lambda choices, tokens: choices.scores_TE.sum()),
        lambda: register_loss("z_loss"),
        lambda: register_loss("penalty"),
    ):
        with pytest.raises(ValueError) as caught:
            action()
        messages.append(str(caught.value))
    return scalars({"iteration": 1, "layers": [layer]}), messages


def test_its_name_is_registered_once() -> None:
    ((numbers, (unknown, taken, wrong)),) = run_distributed(1, _name_losses)
    assert numbers["moe/layer_01/new_loss"] == 0.25
    assert unknown.startswith("no auxiliary loss is called 'unknown_loss': call moe_parallel.tele")
    assert taken.startswith("the name 'z_loss' already belongs to another loss")
    assert wrong.endswith("let it end in _loss")


def _register_late() -> dict[str, Any]:
    """A loss that is registered after the sums were made has no columns, and harms none."""
    import torch

    from moe_parallel.telemetry.metrics import register_loss
    from moe_parallel.telemetry.statistics import RoutingTotals

    totals = RoutingTotals.zeros(1, 2, torch.device("cpu"))
    register_loss("late_loss")
    with pytest.raises(ValueError):
        totals.add_loss(1, "late_loss", torch.tensor(3.0))
    totals.add_loss(1, "routing_free_loss", torch.tensor(3.0))
    scores_TE = torch.zeros(1, 2)
    totals.add(1, torch.tensor([1, 0]), scores_TE)
    (layer,) = totals.summaries()
    return layer


def test_a_loss_registered_late_changes_no_other_number() -> None:
    (layer,) = run_distributed(1, _register_late)
    assert layer["routing_free_loss"] == 3.0 and "late_loss" not in layer
    assert layer["experts_per_token"] == 1
