"""The folder of a study.

FOLDER/study.json                    the contenders, the seeds, and how runs were started
FOLDER/cells/NAME/seed-1234/         one run: the files of --save, and
    cell.yaml                        its configuration
    output.txt                       its output
    attempts.jsonl                   a line per start: where it ran, how long, how it ended
FOLDER/table.md table.csv cells.csv table.json figures/    the report
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_parallel.analysis.study.contenders import Contender, SharedFile
from moe_parallel.config.config import make_config
from moe_parallel.config.message import flag, shown
from moe_parallel.errors import InputError
from moe_parallel.telemetry.metrics import FILE_NAME, Record, read_metrics

MANIFEST = "study.json"


@dataclass(frozen=True)
class StudyManifest:
    """The content of study.json. `parameters`: those of each contender, from
    count_parameters.py."""

    contenders: dict[str, Contender]
    seeds: list[int]
    processes: int
    threads: int
    parameters: dict[str, dict[str, Any]]

    @property
    def train_iters(self) -> int:
        return next(iter(self.contenders.values())).config.training.train_iters

    def joined_to(self, earlier: StudyManifest, file: SharedFile) -> StudyManifest:
        """The study that contains both, the earlier first.

        The contenders of the earlier study are built again from `file` and compared. Raises
        InputError if one of its runs would now be a different run.
        """
        for name in ("processes", "threads"):
            if getattr(earlier, name) != getattr(self, name):
                raise InputError(_other(name, getattr(earlier, name), getattr(self, name)))
        for name, before in earlier.contenders.items():
            now = self.contenders.get(name)
            if now is None:
                now = file.contender(name, before.system, before.overrides)
            _check_same(before, now)
        return StudyManifest(
            {**earlier.contenders, **self.contenders},
            earlier.seeds + [seed for seed in self.seeds if seed not in earlier.seeds],
            self.processes,
            self.threads,
            earlier.parameters,
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StudyManifest:
        content = json.loads(text)
        content["contenders"] = {
            name: Contender(**contender) for name, contender in content["contenders"].items()
        }
        return cls(**content)


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    contender: str
    seed: int
    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    def records(self) -> list[Record]:
        metrics = self.folder / FILE_NAME
        return read_metrics(metrics) if metrics.is_file() else []

    def is_finished(self, train_iters: int) -> bool:
        """Whether the metrics contain the evaluation that ends a run."""
        return any(r["iteration"] >= train_iters and "validation" in r for r in self.records())

    def attempts(self) -> list[dict[str, Any]]:
        """One entry for each time that the run was started and ended, in order."""
        path = self.folder / "attempts.jsonl"
        if not path.is_file():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]

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
        path = self.path / MANIFEST
        if not path.is_file():
            if self.path.is_dir() and any(p for p in self.path.iterdir() if p.name[0] != "."):
                raise InputError(
                    f"--output {self.path} holds files, but no {MANIFEST}: name a new folder"
                )
            return None
        try:
            return StudyManifest.from_json(path.read_text(encoding="utf-8"))
        except (ValueError, TypeError, KeyError, OSError):
            raise InputError(f"{path} cannot be read: name another folder, or mend it") from None

    def cell(self, contender: str, seed: int) -> Cell:
        return Cell(contender, seed, self.path / "cells" / contender / f"seed-{seed}")

    def cells(self, contenders: Sequence[str], seeds: Sequence[int]) -> Iterator[Cell]:
        """The runs, seed by seed, so that changes on the machine affect all contenders equally."""
        for seed in seeds:
            yield from (self.cell(contender, seed) for contender in contenders)


def _check_same(before: Contender, now: Contender) -> None:
    if before.system != now.system:
        raise InputError(_other(f"{before.name} =", before.system, now.system))
    one, other = (
        {name: value for _, part in make_config(c.options).values() for name, value in part.items()}
        for c in (before, now)
    )
    for name, value in one.items():
        if other[name] != value:
            raise InputError(_other(f"{before.name} with {flag(name)}", value, other[name]))


def _other(what: str, before: Any, now: Any) -> str:
    return (
        f"--output holds a study of {what} {shown(before)}, and now it is {shown(now)}: give the "
        "options of that study, or name another folder"
    )
