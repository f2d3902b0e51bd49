"""The folder of a study, and the learning-rate sweeps that its pilot runs make.

FOLDER/study.json                    contenders, seeds, design, and how runs were started
FOLDER/cells/NAME/seed-1234/         one run: the files of --save, and
    cell.yaml                        its configuration
    output.txt                       its output
    attempts.jsonl                   a line per start: where it ran, how long, how it ended
FOLDER/pilots/NAME/lr-0.001/         a pilot run of the learning-rate grid, with the same files
FOLDER/table.md cells.csv figures/   the report

Every contender has the same number of pilot runs: those of the grid, and one that follows from
their losses. If the best rate is at an edge of the grid, the further run is one step beyond the
edge; otherwise it is halfway (in logarithm) between the best rate and the better of its neighbors.
The runs of balance-grid follow at the best of all rates, in lr-0.001-moe_aux_loss_coeff-0.1/.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.study.contenders import Contender, Options, SharedFile
from moe_parallel.analysis.study.design import StudyDesign
from moe_parallel.analysis.study.measures import RunMeasures, judged_loss, measures
from moe_parallel.config.config import Config, make_config
from moe_parallel.config.message import flag, shown
from moe_parallel.errors import InputError
from moe_parallel.reading import parse_json, read_lines, read_small
from moe_parallel.telemetry.metrics import METRICS_FILE, MetricsLine, read_metrics

STUDY_MANIFEST = "study.json"
Change = tuple[str, Any, Any]  # what differs, before, now
DIVERGED = 3  # the exit code of a run whose loss became NaN or infinite (training/signals.py)


@dataclass(frozen=True)
class Cell:
    """One run of a study. `lr`: the learning rate of a pilot run; None: a run that is compared.
    `balance`: the option of balance-grid that a pilot run tries, and its value."""

    contender: str
    seed: int
    folder: Path
    lr: float | None = None
    balance: tuple[str, float] | None = None

    @property
    def label(self) -> str:
        if self.lr is None:
            return f"{self.contender}, seed {self.seed}"
        tried = "" if self.balance is None else f", {flag(self.balance[0])} {self.balance[1]:g}"
        return f"{self.contender}, pilot run at lr {self.lr:g}{tried}"

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    def records(self) -> list[MetricsLine]:
        metrics = self.folder / METRICS_FILE
        return read_metrics(metrics) if metrics.is_file() else []

    def measures(self) -> RunMeasures:
        """Those of a run that has begun."""
        return measures(RunHistory.from_records(self.records()))

    def is_finished(self, train_iters: int) -> bool:
        """Whether the metrics contain the evaluation that ends a run."""
        return any(r["iteration"] >= train_iters and "validation" in r for r in self.records())

    @property
    def has_diverged(self) -> bool:
        """Whether its last start ended because the loss was not finite."""
        attempts = self.attempts()
        return bool(attempts) and attempts[-1]["exit_code"] == DIVERGED

    def attempts(self) -> list[dict[str, Any]]:
        """One entry for each time that the run was started and ended, in order."""
        path = self.folder / "attempts.jsonl"
        if not path.is_file():
            return []
        try:
            return [parse_json(line) for line in read_lines(path) if line.strip()]
        except ValueError as error:
            raise InputError(f"{path} is damaged ({error}): move it away") from None

    def add_attempt(self, attempt: dict[str, Any]) -> None:
        with (self.folder / "attempts.jsonl").open("a") as file:
            file.write(json.dumps(attempt) + "\n")


@dataclass(frozen=True)
class StudyManifest:
    """The content of study.json, by contender's name.

    seeds: those of the runs that are compared.
    parameters: what count_parameters.py prints.
    fitted: options that make a contender equal to the first on the terms of the design.
    tuned: options that the pilot runs have decided, for the runs that are compared.
    """

    contenders: dict[str, Contender]
    seeds: dict[str, list[int]]
    processes: int
    threads: int
    parameters: dict[str, dict[str, Any]]
    design: StudyDesign = StudyDesign()
    fitted: dict[str, Options] = field(default_factory=dict)
    tuned: dict[str, Options] = field(default_factory=dict)

    @property
    def reference(self) -> Contender:
        """The contender with which the others are compared: the first."""
        return next(iter(self.contenders.values()))

    def fitted_contender(self, name: str) -> Contender:
        """The contender of the pilot runs."""
        return self.contenders[name].with_options(self.fitted.get(name, {}))

    def settled(self, name: str) -> Contender:
        """The contender of the runs that are compared."""
        return self.fitted_contender(name).with_options(self.tuned.get(name, {}))

    def contender_of(self, cell: Cell) -> Contender:
        """The contender with the options of this run."""
        if cell.lr is None:
            return self.settled(cell.contender)
        contender = self.fitted_contender(cell.contender)
        tried = dict([cell.balance] if cell.balance else [])
        return contender.with_options(lr_options(contender, cell.lr) | tried)

    def config_of(self, cell: Cell) -> Config:
        """The configuration of a run, saved in its folder."""
        options = self.contender_of(cell).options
        return make_config(options | {"seed": cell.seed, "save": str(cell.folder)})

    def is_finished(self, cell: Cell) -> bool:
        return cell.is_finished(self.contender_of(cell).config.training.train_iters)

    def is_over(self, cell: Cell) -> bool:
        """Whether the run is not to be trained again: a pilot run that diverged is a result."""
        return self.is_finished(cell) or (cell.lr is not None and cell.has_diverged)

    def joined_to(self, earlier: StudyManifest, file: SharedFile) -> StudyManifest:
        """The study that contains both, the earlier first.

        The contenders of the earlier study are built again from `file` and compared. Raises
        InputError if one of its runs would now be a different run.
        """
        for what, its, ours in self._changes(earlier, file):
            if its != ours:
                raise InputError(
                    f"--output holds a study of {what} {shown(its)}, and now it is {shown(ours)}: "
                    "give the options of that study, or name another folder"
                )
        names = {**earlier.contenders, **self.contenders}
        seeds = {n: {*earlier.seeds.get(n, []), *self.seeds.get(n, [])} for n in names}
        return dataclasses.replace(
            earlier, contenders=names, seeds={name: sorted(its) for name, its in seeds.items()}
        )

    def _changes(self, earlier: StudyManifest, file: SharedFile) -> Iterator[Change]:
        """What must be the same in both studies."""
        for name in ("processes", "threads"):
            yield name, getattr(earlier, name), getattr(self, name)
        for each in dataclasses.fields(StudyDesign):
            if each.compare:
                its, ours = (getattr(study.design, each.name) for study in (earlier, self))
                yield each.name.replace("_", "-"), its, ours
        for name, its in earlier.contenders.items():
            ours = self.contenders.get(name) or file.contender(name, its.system)
            yield f"{name} =", its.system, ours.system
            for before, now in zip(its.config.values(), ours.config.values(), strict=True):
                for option, value in before[1].items():
                    yield f"{name} with {flag(option)}", value, now[1][option]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, data: bytes) -> StudyManifest:
        content = parse_json(data)
        content["contenders"] = {
            name: Contender(**contender) for name, contender in content["contenders"].items()
        }
        if not all(type(seed) is int for seeds in content["seeds"].values() for seed in seeds):
            raise TypeError("seeds")
        content["design"] = StudyDesign.from_json(content["design"])
        return cls(**content)


@dataclass(frozen=True)
class StudyFolder:
    """The folder that contains a study."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def manifest(self) -> StudyManifest | None:
        """The manifest. None if no study has begun. Raises InputError if the folder contains
        something else."""
        path = self.path / STUDY_MANIFEST
        if not path.is_file():
            if self.path.is_dir() and any(p for p in self.path.iterdir() if p.name[0] != "."):
                raise InputError(
                    f"--output {self.path} contains files, but no {STUDY_MANIFEST}: name a new "
                    "folder"
                )
            return None
        try:
            return StudyManifest.from_json(read_small(path))
        except (ValueError, TypeError, LookupError, AttributeError, OSError):
            raise InputError(f"{path} cannot be read: name another folder, or repair it") from None

    def cell(self, contender: str, seed: int) -> Cell:
        return Cell(contender, seed, self.path / "cells" / contender / f"seed-{seed}")

    def pilot(
        self, contender: str, seed: int, lr: float, balance: tuple[str, float] | None = None
    ) -> Cell:
        name = f"lr-{lr:g}" + ("" if balance is None else f"-{balance[0]}-{balance[1]:g}")
        return Cell(contender, seed, self.path / "pilots" / contender / name, lr, balance)

    def cells(self, seeds: Mapping[str, Sequence[int]]) -> Iterator[Cell]:
        """The runs, seed by seed, so that changes on the machine affect all contenders equally.
        `seeds`: by contender."""
        for seed in sorted({seed for its in seeds.values() for seed in its}):
            yield from (self.cell(name, seed) for name, its in seeds.items() if seed in its)


@dataclass(frozen=True)
class Sweep:
    """The learning-rate sweep of a contender. `grid`: rates in rising order. `losses`: of the pilot
    runs that have ended, by rate; infinite if training diverged. `option`, `values`: what
    balance-grid tries at the best rate; `by_value`: the losses there, likewise."""

    grid: tuple[float, ...]
    losses: Mapping[float, float]
    option: str | None = None
    values: tuple[float, ...] = ()
    by_value: Mapping[float, float] = field(default_factory=dict)

    @property
    def further(self) -> float | None:
        """The rate of the further run. None: the grid is not finished."""
        grid = self.grid
        if any(rate not in self.losses for rate in grid):
            return None
        best = grid.index(self._lowest(grid))
        if best in (0, len(grid) - 1):
            return rounded(grid[best] ** 2 / grid[1 if best == 0 else -2])
        return rounded(math.sqrt(grid[best] * self._lowest([grid[best - 1], grid[best + 1]])))

    @property
    def rates(self) -> list[float]:
        """The rates that are known so far, in rising order."""
        return sorted({*self.grid, *([] if self.further is None else [self.further])})

    @property
    def has_rates(self) -> bool:
        return self.further in self.losses

    @property
    def is_finished(self) -> bool:
        return self.has_rates and (self.best is None or self.by_value.keys() >= set(self.values))

    @property
    def best_value(self) -> float | None:
        """The value of `option` with the lowest loss. None: that of the contender, or not known."""
        if not self.is_finished or self.best is None or not self.values:
            return None
        value = min(self.values, key=self.by_value.__getitem__)
        return value if self.by_value[value] < self.losses[self.best] else None

    @property
    def best(self) -> float | None:
        """The rate with the lowest loss; of several, the lowest rate.

        None: a run is not finished, or all diverged.
        """
        best = self._lowest(self.rates) if self.has_rates else None
        return best if best is not None and math.isfinite(self.losses[best]) else None

    @property
    def best_is_at_an_edge(self) -> bool:
        """Whether a rate beyond those tried might be better."""
        return self.best in (self.rates[0], self.rates[-1])

    def _lowest(self, rates: Sequence[float]) -> float:
        return min(rates, key=self.losses.__getitem__)


def rounded(rate: float) -> float:
    """The rate with four digits, as files and folders name it."""
    return float(f"{rate:.4g}")


def grid_of(contender: Contender, factors: Sequence[float]) -> tuple[float, ...]:
    """The rates of the contender's grid: multiples of its own rate. Raises InputError if that is
    0."""
    if not (own := contender.config.optimizer.lr):
        raise InputError(f"contender {contender.name}: --lr is 0, and a grid needs a rate above 0")
    return tuple(rounded(own * factor) for factor in factors)


def lr_options(contender: Contender, rate: float) -> Options:
    """The options of a run at this rate. The whole schedule is scaled, so its shape stays."""
    optimizer = contender.config.optimizer
    return {"lr": rate, "min_lr": rounded(optimizer.min_lr * rate / optimizer.lr)}


def pilot_cells(
    folder: StudyFolder, manifest: StudyManifest, name: str, sweep: Sweep
) -> list[Cell]:
    """The pilot runs of the contender that are known so far, the grid first."""
    further = [] if sweep.further is None else [sweep.further]
    seed = manifest.design.pilot_seed
    assert seed is not None
    cells = [folder.pilot(name, seed, rate) for rate in (*sweep.grid, *further)]
    if sweep.best is not None and sweep.option is not None:
        tried = [(sweep.option, value) for value in sweep.values]
        cells += [folder.pilot(name, seed, sweep.best, each) for each in tried]
    return cells


def read_sweep(folder: StudyFolder, manifest: StudyManifest, name: str) -> Sweep:
    """The learning-rate sweep of the contender, as far as it is finished."""
    losses: dict[float, float] = {}
    by_value: dict[float, float] = {}
    option, values = manifest.design.balance_grid.get(name, (None, ()))
    grid = grid_of(manifest.fitted_contender(name), manifest.design.lr_grid)
    sweep = Sweep(grid, losses, option, values, by_value)
    for _ in range(3):  # the further run is known after the grid, those of balance-grid after it
        for cell in pilot_cells(folder, manifest, name, sweep):
            if cell.lr is not None and manifest.is_over(cell):
                finished = manifest.is_finished(cell)
                loss = judged_loss(cell.measures(), manifest.design.judged_by) if finished else None
                loss = math.inf if loss is None else loss
                if cell.balance is None:
                    losses[cell.lr] = loss
                else:
                    by_value[cell.balance[1]] = loss
    return sweep


def tuned_options(folder: StudyFolder, manifest: StudyManifest, name: str) -> Options | None:
    """What the pilot runs decide for the contender. None: runs are missing, or all diverged."""
    sweep = read_sweep(folder, manifest, name)
    if sweep.best is None or not sweep.is_finished:
        return None
    tried = {} if sweep.best_value is None else {str(sweep.option): sweep.best_value}
    return lr_options(manifest.fitted_contender(name), sweep.best) | tried
