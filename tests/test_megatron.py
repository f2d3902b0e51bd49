"""Our layers in a trainer like Megatron-LM's train the same model as our own program."""

from pathlib import Path
from typing import NamedTuple

import pytest
from torch import distributed as dist

from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups
from moe_parallel.telemetry.metrics import loss_names
from tests import systems
from tests.distributed import run_distributed
from tests.megatron_lm import Trainer, finish
from tests.model.small_gpt import SIZES, Options, build, micro_batches
from tests.model.test_layouts import layout

STEPS, HALF = 10, 5

CASES: dict[str, Options] = {
    "topk": {"moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 0.01, "moe_layer_freq": "[0]+[1]*3"},
    "aoe": systems.options("aoe"),
    "top_p": systems.options("top_p, a moving p"),
    "threshold": systems.options("threshold"),
    "lory": systems.options("lory"),
}
LAYOUTS: dict[str, Options] = {
    "ep2": layout(ep=2),
    "tp2": layout(tp=2, etp=2),
    "pp2": layout(pp=2, distributed=True),
}


class Outcome(NamedTuple):
    losses: list[float]  # of each step, per token
    auxiliary: list[dict[str, float]]  # of each step: mean over layers and micro-batches


def train_on_one_rank(folder: Path) -> dict[str, tuple[Outcome, Outcome]]:
    """What our own program gives, and what the trainer does."""
    return {name: (_own(case), _trained(case, folder)) for name, case in CASES.items()}


def train_on_two(folder: Path) -> dict[str, Outcome]:
    """Every case in every layout; the second half once more, resumed in another layout."""
    found = {}
    for name, case in CASES.items():
        for where, its in LAYOUTS.items():
            if systems.merges(name) and where == "ep2":
                its = layout()
            save = folder / name if where == "ep2" else None
            found[f"{name}, {where}"] = _trained(case | its, folder, save=save)
        resumed = case | layout(tp=2, etp=2)
        found[f"{name}, resumed"] = _trained(resumed, folder, load=folder / name)
    return found


def _own(options: Options) -> Outcome:
    config = make_config(SIZES | options)
    engine = build(config)
    found = Outcome([], [])
    for step in range(STEPS):
        found.losses.append(engine.step(micro_batches(config, 4 * step, engine)).lm_loss)
        layers = engine.statistics.training.reduced([None]).summaries()
        engine.statistics.training.clear()
        names = [name for name in loss_names() if name in layers[-1]]
        found.auxiliary.append(
            {name: sum(layer[name] for layer in layers) / len(layers) for name in names}
        )
    destroy_groups()
    return found


def _trained(
    options: Options, folder: Path, save: Path | None = None, load: Path | None = None
) -> Outcome:
    trainer = Trainer(options, folder / f"{dist.get_rank()}.yaml")
    if load is not None:
        trainer.load_checkpoint(load)
    found = Outcome([], [])
    while trainer.iteration < STEPS:
        found.losses.append(trainer.train_step())
        found.auxiliary.append(trainer.training_log())
        if trainer.iteration == HALF and save is not None:
            trainer.evaluate()
            trainer.save_checkpoint(save)
    finish()
    return found


def test_our_own_program_and_every_layout_have_the_same_losses(tmp_path: Path) -> None:
    (on_one,) = run_distributed(1, train_on_one_rank, tmp_path)
    on_two, _ = run_distributed(2, train_on_two, tmp_path)
    found = {name: outcome for name, (_, outcome) in on_one.items()} | on_two
    wrong = []
    for name, outcome in found.items():
        own, _ = on_one[name.split(",")[0]]
        steps = len(outcome.losses)
        if outcome.losses != pytest.approx(own.losses[-steps:], rel=1e-5):
            wrong.append((name, outcome.losses, own.losses))
        for here, expected in zip(outcome.auxiliary, own.auxiliary[-steps:], strict=True):
            # The tracker keeps the names of earlier cases.
            if {name: here[name] for name in expected} != pytest.approx(expected, rel=1e-4):
                wrong.append((name, here, expected))
    assert not wrong
