"""Models that train on from one checkpoint in several layouts, and the differences between them."""

from pathlib import Path
from typing import NamedTuple

import numpy

from tests.distributed import run_distributed
from tests.model.small_gpt import Options, Outcome, begin_each, train_each, whole

TOLERANCE = 1e-5  # relative, in fp32; measured deviations are a few 1e-7

Runs = dict[str, list[Outcome]]  # by name; each run has the outcomes on all ranks


class Start(NamedTuple):
    """The checkpoint from which every layout of a system starts, and the reference results."""

    checkpoint: Path
    on_one_rank: list[Outcome]


def make_starts(models: dict[str, Options], directory: Path) -> dict[str, Start]:
    """The start of each model, all made by one process."""
    (made,) = run_distributed(1, begin_each, models, directory)
    return {name: Start(path, [outcome]) for name, (path, outcome) in made.items()}


def make_start(options: Options, directory: Path) -> Start:
    return make_starts({"one": options}, directory)["one"]


def run_each(world: int, cases: dict[str, tuple[Start, Options]]) -> Runs:
    """Train each case from its start on `world` ranks, in one world of processes."""
    jobs = {name: (start.checkpoint, options) for name, (start, options) in cases.items()}
    ranks = run_distributed(world, train_each, jobs, timeout=300)
    return {name: [rank[name] for rank in ranks] for name in cases}


def run_all(world: int, start: Start, cases: dict[str, Options]) -> Runs:
    """Train each case from the same start."""
    return run_each(world, {name: (start, options) for name, options in cases.items()})


def differences(found: Runs, expected: list[Outcome]) -> dict[str, list[str]]:
    """The differences from the expected run by name of the case; {} if there are none."""
    reported = {name: _differences(ranks, expected) for name, ranks in found.items()}
    return {name: wrong for name, wrong in reported.items() if wrong}


def _differences(ranks: list[Outcome], expected: list[Outcome]) -> list[str]:
    wrong = []
    reference = expected[0]
    for measure in ("iterations", "learning_rates", "losses", "grad_norms", "tokens"):
        wanted = getattr(reference, measure)
        for rank, outcome in enumerate(ranks):
            values = getattr(outcome, measure)
            if not numpy.allclose(values, wanted, rtol=TOLERANCE, atol=0):
                wrong.append(f"{measure} on rank {rank}: {values}, not {wanted}")
    for layer, wanted in zip(ranks[0].layers, reference.layers, strict=True):
        for name, value in layer.items():
            if name == "wire_bytes_per_token":  # it depends on the layout
                continue
            if not numpy.allclose(value, wanted[name], rtol=TOLERANCE):
                wrong.append(f"{name} of layer {layer['layer']}: {value}, not {wanted[name]}")
    weights = whole([outcome.pieces for outcome in ranks])
    for name, wanted in whole([outcome.pieces for outcome in expected]).items():
        # Adam moves a weight by its learning rate even if the gradient is rounding noise, so single
        # weights may differ, but not a matrix as a whole.
        distance = numpy.linalg.norm(weights[name] - wanted) / numpy.linalg.norm(wanted)
        if not distance < 1e-4:
            wrong.append(f"{name} is off by {distance:.1e} after training")
    return wrong
