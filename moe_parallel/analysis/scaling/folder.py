"""The folder of a scaling study: one folder for each cell, with its configuration and its run."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.scaling.grid import ScalingCell
from moe_parallel.errors import InputError
from moe_parallel.reading import read_end, read_json, read_word
from moe_parallel.telemetry.metrics import METRICS_FILE, read_metrics

FINISHED, QUEUED, FAILED, NEW = "finished", "in the queue", "failed", "new"
_REMEDY = ": restore it, or move its folder away"


@dataclass(frozen=True)
class CellFolder:
    """`path`/cell.json, cell.yaml, job (the number of its last job), job.out and run/."""

    path: Path
    cell: ScalingCell

    @staticmethod
    def of(study: Path, cell: ScalingCell) -> CellFolder:
        return CellFolder(study / cell.name, cell)

    @staticmethod
    def read_all(study: Path) -> list[CellFolder]:
        """The cells that were ever written, by number of nodes."""
        found = []
        for file in study.glob("*/cell.json"):
            try:
                found.append(CellFolder(file.parent, ScalingCell(**read_json(file, _REMEDY))))
            except TypeError:
                raise InputError(f"{file} is not a cell of a study{_REMEDY}") from None
        return sorted(found, key=lambda each: (each.cell.nodes, each.cell.name))

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def config_file(self) -> Path:
        return self.path / "cell.yaml"

    @property
    def job_file(self) -> Path:
        return self.path / "job"

    @property
    def output(self) -> Path:
        return self.path / "job.out"

    def write(self) -> None:
        """Write the cell. Raises InputError if the folder has another cell of this name."""
        text = json.dumps(asdict(self.cell), indent=1)
        file = self.path / "cell.json"
        if file.exists() and read_json(file, _REMEDY) != json.loads(text):
            raise InputError(
                f"{self.path} holds a run with other options: name another folder for this study"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        options = {name.replace("_", "-"): value for name, value in self.cell.options.items()}
        self.config_file.write_text(yaml.safe_dump(options, sort_keys=False))

    @property
    def history(self) -> RunHistory | None:
        """The history of the run. None: it has no record yet."""
        file = self.run / METRICS_FILE
        records = read_metrics(file) if file.exists() else []
        return RunHistory.from_records(records) if records else None

    @property
    def is_finished(self) -> bool:
        history, last = self.history, self.cell.config.training.train_iters
        return history is not None and last is not None and history.last_iteration >= last

    def state(self, queue: Collection[str]) -> str:
        """FINISHED, QUEUED, FAILED or NEW. `queue`: the numbers of the jobs in Slurm's queue."""
        if self.job_file.exists() and read_word(self.job_file) in queue:
            return QUEUED
        if self.is_finished:
            return FINISHED
        return FAILED if self.job_file.exists() else NEW

    @property
    def last_line(self) -> str:
        """The last line of the output of the cell's jobs."""
        said = read_end(self.output).split("\n") if self.output.exists() else []
        return next((line.strip() for line in reversed(said) if line.strip()), "no output")
