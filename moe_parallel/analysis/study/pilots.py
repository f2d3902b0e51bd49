"""What the pilot runs of a contender have measured."""

from __future__ import annotations

import math
import statistics

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.study.contenders import Options
from moe_parallel.analysis.study.folder import Cell, StudyFolder, StudyManifest
from moe_parallel.analysis.study.measures import RunMeasures, judged_loss, measures
from moe_parallel.analysis.study.sweep import Sweep, grid_of, lr_options
from moe_parallel.analysis.study.terms import fitted_iterations


def pilot_cells(
    folder: StudyFolder, manifest: StudyManifest, name: str, sweep: Sweep
) -> list[Cell]:
    """The pilot runs of the contender that are known so far, the grid first."""
    further = [] if sweep.further is None else [sweep.further]
    return [_cell(folder, manifest, name, rate) for rate in (*sweep.grid, *further)]


def read_sweep(folder: StudyFolder, manifest: StudyManifest, name: str) -> Sweep:
    """The learning-rate sweep of the contender, as far as it is finished."""
    grid = grid_of(manifest.fitted_contender(name), manifest.design.lr_grid)
    sweep = Sweep(grid, _losses(folder, manifest, name, grid))
    if sweep.further is None:
        return sweep
    return Sweep(grid, {**sweep.losses, **_losses(folder, manifest, name, (sweep.further,))})


def tuned_options(folder: StudyFolder, manifest: StudyManifest, name: str) -> Options | None:
    """What the pilot runs decide for the contender: the best rate and, if contenders have equal
    time, the iterations. None: runs are missing, or all of them diverged."""
    sweep = read_sweep(folder, manifest, name)
    if sweep.best is None:
        return None
    contender = manifest.fitted_contender(name)
    options = lr_options(contender, sweep.best)
    if not manifest.design.terms.timed:
        return options
    reference = manifest.reference.name
    its_sweep = read_sweep(folder, manifest, reference)
    if its_sweep.best is None:
        return None
    speed = _speed(folder, manifest, name, sweep)
    its_speed = _speed(folder, manifest, reference, its_sweep)
    return options | fitted_iterations(contender, speed / its_speed)


def _losses(
    folder: StudyFolder, manifest: StudyManifest, name: str, rates: tuple[float, ...]
) -> dict[float, float]:
    """The losses of the finished pilot runs at these rates; infinite if one diverged."""
    losses = {}
    for rate in rates:
        cell = _cell(folder, manifest, name, rate)
        if manifest.is_finished(cell):
            loss = judged_loss(_measures(cell), manifest.design.judged_by)
            losses[rate] = math.inf if loss is None else loss
        elif cell.has_diverged:
            losses[rate] = math.inf
    return losses


def _speed(folder: StudyFolder, manifest: StudyManifest, name: str, sweep: Sweep) -> float:
    """The median over the finished pilot runs, in tokens per second."""
    cells = pilot_cells(folder, manifest, name, sweep)
    finished = [cell for cell in cells if manifest.is_finished(cell)]
    return statistics.median(_measures(cell)["tokens_per_second"] for cell in finished)


def _measures(cell: Cell) -> RunMeasures:
    return measures(RunHistory.from_records(cell.records()))


def _cell(folder: StudyFolder, manifest: StudyManifest, name: str, rate: float) -> Cell:
    seed = manifest.design.pilot_seed
    assert seed is not None
    return folder.pilot(name, seed, rate)
