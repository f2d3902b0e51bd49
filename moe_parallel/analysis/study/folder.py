"""The folder of a study.

FOLDER/study.json                    contenders, seeds, design, and how runs were started
FOLDER/cells/NAME/seed-1234/         one run: the files of --save, and
    cell.yaml                        its configuration
    output.txt                       its output
    attempts.jsonl                   a line per start: where it ran, how long, how it ended
FOLDER/pilots/NAME/lr-0.001/         a pilot run of the learning-rate grid, with the same files
FOLDER/table.md table.csv cells.csv table.json figures/    the report
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_parallel.analysis.study.contenders import Contender, Options, SharedFile
from moe_parallel.analysis.study.design import StudyDesign
from moe_parallel.analysis.study.sweep import lr_options
from moe_parallel.config.config import Config, make_config
from moe_parallel.config.message import flag, shown
from moe_parallel.errors import InputError
from moe_parallel.reading import parse_json, read_lines, read_small
from moe_parallel.telemetry.metrics import METRICS_FILE, MetricsLine, read_metrics

STUDY_MANIFEST = "study.json"
Change = tuple[str, Any, Any]  # what differs, before, now
DIVERGED = 3  # the exit code of a run whose loss became NaN or infinite (training/exit_codes.py)


@dataclass(frozen=True)
class StudyManifest:
    """The content of study.json, by contender's name.

    seeds: those of the runs that are compared.
    parameters: what count_parameters.py prints.
    fitted: options that make a contender equal to the first on the terms of the design.
    tuned: options that the pilot runs have decided, for the runs that are compared.
    python: the Python whose sources are the text; None: --data-path names the text.
    """

    contenders: dict[str, Contender]
    seeds: dict[str, list[int]]
    processes: int
    threads: int
    parameters: dict[str, dict[str, Any]]
    design: StudyDesign = StudyDesign()
    fitted: dict[str, Options] = field(default_factory=dict)
    tuned: dict[str, Options] = field(default_factory=dict)
    python: str | None = None

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
        return contender.with_options(lr_options(contender, cell.lr))

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
        again = {
            name: file.contender(name, before.system, before.overrides)
            for name, before in earlier.contenders.items()
            if name not in self.contenders
        }
        now = dataclasses.replace(self, contenders={**again, **self.contenders})
        if (difference := now._difference_from(earlier)) is not None:
            raise InputError(_other(*difference))
        return dataclasses.replace(
            earlier,
            contenders={**earlier.contenders, **self.contenders},
            seeds=_united(earlier.seeds, self.seeds),
            python=earlier.python or self.python,
        )

    def _difference_from(self, earlier: StudyManifest) -> Change | None:
        """The first value in which a run would be another one: (name, its, ours)."""
        for name in ("processes", "threads"):
            if getattr(earlier, name) != getattr(self, name):
                return name, getattr(earlier, name), getattr(self, name)
        if None not in (earlier.python, self.python) and earlier.python != self.python:
            return "the sources of Python", earlier.python, self.python
        if (difference := self.design.difference_from(earlier.design)) is not None:
            return difference
        both = [name for name in earlier.contenders if name in self.contenders]
        pairs = (_difference(earlier.contenders[name], self.contenders[name]) for name in both)
        return next(filter(None, pairs), None)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, data: bytes) -> StudyManifest:
        content = parse_json(data)
        content["contenders"] = {
            name: Contender(**contender) for name, contender in content["contenders"].items()
        }
        if isinstance(content["seeds"], list):  # of an earlier version, the same for all
            content["seeds"] = dict.fromkeys(content["contenders"], content["seeds"])
        if not all(type(seed) is int for seeds in content["seeds"].values() for seed in seeds):
            raise TypeError("seeds")
        content["design"] = StudyDesign.from_json(content.get("design", {}))
        return cls(**content)


@dataclass(frozen=True)
class Cell:
    """One run of a study. `lr`: the learning rate of a pilot run; None: a run that is compared."""

    contender: str
    seed: int
    folder: Path
    lr: float | None = None

    @property
    def label(self) -> str:
        if self.lr is None:
            return f"{self.contender}, seed {self.seed}"
        return f"{self.contender}, pilot run at lr {self.lr:g}"

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    def records(self) -> list[MetricsLine]:
        metrics = self.folder / METRICS_FILE
        return read_metrics(metrics) if metrics.is_file() else []

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

    def pilot(self, contender: str, seed: int, lr: float) -> Cell:
        return Cell(contender, seed, self.path / "pilots" / contender / f"lr-{lr:g}", lr)

    def cells(self, seeds: Mapping[str, Sequence[int]]) -> Iterator[Cell]:
        """The runs, seed by seed, so that changes on the machine affect all contenders equally.
        `seeds`: by contender."""
        for seed in sorted({seed for its in seeds.values() for seed in its}):
            yield from (self.cell(name, seed) for name, its in seeds.items() if seed in its)


def _united(one: Mapping[str, list[int]], other: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The seeds of both by contender, in rising order."""
    return {n: sorted({*one.get(n, []), *other.get(n, [])}) for n in {**one, **other}}


def _difference(before: Contender, now: Contender) -> Change | None:
    if before.system != now.system:
        return f"{before.name} =", before.system, now.system
    one, other = (
        {name: value for _, part in make_config(c.options).values() for name, value in part.items()}
        for c in (before, now)
    )
    for name, value in one.items():
        if other[name] != value:
            return f"{before.name} with {flag(name)}", value, other[name]
    return None


def _other(what: str, before: Any, now: Any) -> str:
    return (
        f"--output holds a study of {what} {shown(before)}, and now it is {shown(now)}: give the "
        "options of that study, or name another folder"
    )
