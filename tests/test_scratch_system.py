"""A third-party system: a configuration, a rule and a record in its own package."""

import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.training.tiny_run import Layout, TinyRun

PACKAGE = '''
"""Nearest: a token goes to the expert of greatest score within a window that turns with it."""

from dataclasses import dataclass

import torch

from moe_parallel.config import Balancing, RoutedSelection
from moe_parallel.config.option import option
from moe_parallel.layers import RoutedLayer
from moe_parallel.layers.routing_losses import load_balancing
from moe_parallel.selection.choices import Choices
from moe_parallel.systems import Rules, System, register


@dataclass(frozen=True)
class WindowSelection(Balancing, RoutedSelection, system="window"):
    """The expert of greatest logit among those of a window."""

    window_size: int = option(2, "experts in a window", least=1, weights=True)

    def check(self, config, world_size):
        super().check(config, world_size)
        if self.window_size > config.num_experts:
            raise ValueError("--window-size is above --num-experts")


@dataclass(frozen=True)
class Window:
    size: int

    def __call__(self, scores_TE, tokens):
        first_TE = torch.arange(len(scores_TE))[:, None] % scores_TE.shape[1]
        distance_TE = (torch.arange(scores_TE.shape[1]) - first_TE) % scores_TE.shape[1]
        logits_TE = scores_TE.masked_fill(distance_TE >= self.size, -torch.inf)
        experts_TK = logits_TE.argmax(dim=1, keepdim=True)
        probabilities_TE = torch.softmax(scores_TE, dim=1)
        return Choices(
            experts_TK, probabilities_TE.gather(1, experts_TK), scores_TE, probabilities_TE
        )


def rules(selection):
    return Rules(Window(selection.window_size), Window(selection.window_size))


register(System(WindowSelection, layer=RoutedLayer, rules=rules, losses=(load_balancing,)))
'''

OPTIONS = {"expert_selection": "window", "window_size": 1, "moe_aux_loss_coeff": 0.05}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "window_system.py").write_text(PACKAGE)
    return folder


def _train(package: Path, runs: Path, layout: Layout) -> tuple[list[tuple[float, float]], list]:
    """Two steps, a checkpoint and another step; then that step again from the checkpoint."""
    sys.path.insert(0, str(package))
    import window_system  # noqa: F401  registers itself

    run = TinyRun(layout, runs, options=OPTIONS)
    measured = run.steps(2)
    run.save()
    last = run.steps(1)
    run.close()
    again = TinyRun(layout, runs, options=OPTIONS)
    again.load(runs)
    return measured + last, again.steps(1) + last


def test_it_trains_on_one_rank_and_on_two_and_goes_on(package: Path, tmp_path: Path) -> None:
    ((alone, resumed),) = run_distributed(1, _train, package, tmp_path / "one", Layout())
    two = run_distributed(2, _train, package, tmp_path / "two", Layout(2, ep=2))
    assert resumed[0] == resumed[1]
    for parallel, _ in two:
        for (loss, norm), (its_loss, its_norm) in zip(alone, parallel, strict=True):
            assert its_loss == pytest.approx(loss, abs=1e-6)
            assert its_norm == pytest.approx(norm, rel=1e-5)


def _describe(package: Path) -> tuple[str, str, list[str]]:
    sys.path.insert(0, str(package))
    import window_system  # noqa: F401

    from moe_parallel import RoutedMoE
    from moe_parallel.config import SELECTIONS, make_config, validate
    from moe_parallel.config.command_line import read_command_line

    with redirect_stdout(StringIO()) as text, pytest.raises(SystemExit):
        read_command_line(["--help"])
    config = make_config(OPTIONS | {"num_experts": 4, "window_size": 5})
    with pytest.raises(ValueError) as broken:
        validate(config, 1)
    moe = RoutedMoE(8, 4, selection=SELECTIONS["window"](window_size=1), backend="reference")
    return (
        " ".join(text.getvalue().split()),
        str(broken.value),
        [type(moe.layer).__name__, moe.layer.rule.size],
    )


def test_it_has_flags_rules_and_a_layer_like_any_other(package: Path) -> None:
    ((text, broken, layer),) = run_distributed(1, _describe, package)
    assert "--window-size N" in text and "[window] experts in a window (default: 2)" in text
    assert "uoe, window: the system" in text
    assert broken == "--window-size is above --num-experts"
    assert layer == ["RoutedLayer", 1]


def _register_twice() -> list[str]:
    from moe_parallel.config import RoutedSelection, TopKSelection
    from moe_parallel.layers import RoutedLayer
    from moe_parallel.systems import System, register, system_of, topk

    messages = []
    for action in (
        lambda: register(System(TopKSelection, RoutedLayer, topk.rules)),
        lambda: register(System(RoutedSelection, RoutedLayer, topk.rules)),
        lambda: type("Other", (RoutedSelection,), {}, system="topk"),
        lambda: system_of(RoutedSelection()),
    ):
        with pytest.raises(ValueError) as caught:
            action()
        messages.append(str(caught.value))
    return messages


def test_a_word_and_a_configuration_stand_for_one_system() -> None:
    ((twice, nameless, taken, unknown),) = run_distributed(1, _register_twice)
    assert twice == "TopKSelection has a record already"
    assert nameless.startswith("RoutedSelection has no word of its own for --expert-selection")
    assert taken == "system 'topk' is TopKSelection already"
    assert unknown.startswith("RoutedSelection has no record: register a System for it")
