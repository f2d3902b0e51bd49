"""The measurements of the finished runs of a study."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.study.contenders import DENSE, Contender
from moe_parallel.analysis.study.folder import Cell, StudyFolder
from moe_parallel.analysis.study.measures import Measures, Spread, measures, spreads
from moe_parallel.errors import InputError

#: Key in a contender's parameters: the experts per token with which its active parameters are
#: counted, if training decided that number.
MEASURED = "experts_per_token"


@dataclass(frozen=True)
class Run:
    """A finished run."""

    seed: int
    history: RunHistory
    measures: Measures
    attempts: list[dict[str, Any]]

    @classmethod
    def read(cls, cell: Cell) -> Run:
        history, attempts = RunHistory.from_records(cell.records()), cell.attempts()
        return cls(cell.seed, history, measures(history), attempts)


@dataclass(frozen=True)
class Result:
    """The results of a contender. `parameters`: total, active and active_compute."""

    contender: Contender
    parameters: dict[str, Any]
    runs: dict[int, Run]  # by seed

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def is_dense(self) -> bool:
        return self.contender.system == DENSE

    @property
    def warnings(self) -> list[str]:
        """Warnings for the reader about this contender's loss."""
        return [] if self.is_dense else self.contender.config.warnings

    @cached_property
    def measures(self) -> dict[int, Measures]:
        return {seed: run.measures for seed, run in self.runs.items()}

    @cached_property
    def spreads(self) -> dict[str, Spread]:
        return spreads(list(self.measures.values()))

    @property
    def first(self) -> RunHistory:
        """The run with the first seed, for figures that can show only one run."""
        return next(iter(self.runs.values())).history


@dataclass(frozen=True)
class StudyResults:
    """The results of a study. `results`: those of the contenders with a finished run; `missing`:
    the runs that are not finished."""

    name: str
    results: list[Result]
    missing: list[Cell]
    seeds: list[int]
    processes: int
    threads: int

    @classmethod
    def read(cls, folder: StudyFolder) -> StudyResults:
        """Read the folder. Raises InputError if it has no study, or no finished run."""
        manifest = folder.manifest()
        if manifest is None:
            raise InputError(f"{folder.path} holds no study: name the folder of --output")
        cells = list(folder.cells(list(manifest.contenders), manifest.seeds))
        finished = [cell for cell in cells if cell.is_finished(manifest.train_iters)]
        if not finished:
            raise InputError(f"{folder.path} has no finished run yet: let the study train one")
        runs: dict[str, dict[int, Run]] = {}
        for cell in finished:
            runs.setdefault(cell.contender, {})[cell.seed] = Run.read(cell)
        results = [
            Result(contender, manifest.parameters.get(name, {}), runs[name])
            for name, contender in manifest.contenders.items()
            if name in runs
        ]
        missing = [cell for cell in cells if cell not in finished]
        seeds, processes = manifest.seeds, manifest.processes
        return cls(folder.name, results, missing, seeds, processes, manifest.threads)

    @property
    def reference(self) -> Result:
        """The contender with which the others are compared: the first."""
        return self.results[0]

    @property
    def domains(self) -> list[str]:
        """The domains of the held-out text."""
        return list(self.reference.first.final)
