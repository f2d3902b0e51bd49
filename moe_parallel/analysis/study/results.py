"""The measurements of the finished runs of a study."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.study.contenders import DENSE, Contender
from moe_parallel.analysis.study.design import StudyDesign
from moe_parallel.analysis.study.folder import Cell, StudyFolder, StudyManifest
from moe_parallel.analysis.study.measures import RunMeasures, Spread, measures, spreads
from moe_parallel.analysis.study.pilots import read_sweep
from moe_parallel.analysis.study.sweep import Sweep
from moe_parallel.errors import InputError

#: Key in a contender's parameters: the experts per token with which its active parameters are
#: counted, if training decided that number.
MEASURED = "experts_per_token"


@dataclass(frozen=True)
class Run:
    """A finished run."""

    seed: int
    history: RunHistory
    measures: RunMeasures
    attempts: list[dict[str, Any]]

    @classmethod
    def read(cls, cell: Cell) -> Run:
        history, attempts = RunHistory.from_records(cell.records()), cell.attempts()
        return cls(cell.seed, history, measures(history), attempts)


@dataclass(frozen=True)
class Result:
    """The results of a contender. `parameters`: what count_parameters.py prints."""

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
    def measures(self) -> dict[int, RunMeasures]:
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
    the runs that are not finished; `sweeps`: the learning-rate sweeps by contender, if there are
    any."""

    name: str
    results: list[Result]
    missing: list[Cell]
    processes: int
    threads: int
    design: StudyDesign
    sweeps: dict[str, Sweep]

    @classmethod
    def read(cls, folder: StudyFolder) -> StudyResults:
        """Read the folder. Raises InputError if it has no study, or no finished run."""
        manifest = folder.manifest()
        if manifest is None:
            raise InputError(f"{folder.path} does not contain a study: name the folder of --output")
        cells = list(folder.cells(manifest.seeds))
        finished = [cell for cell in cells if manifest.is_finished(cell)]
        if not finished:
            raise InputError(f"{folder.path} has no finished run yet: let the study train one")
        runs: dict[str, dict[int, Run]] = {}
        for cell in finished:
            runs.setdefault(cell.contender, {})[cell.seed] = Run.read(cell)
        results = [
            Result(manifest.settled(name), manifest.parameters.get(name, {}), runs[name])
            for name in manifest.contenders
            if name in runs
        ]
        missing = [cell for cell in cells if cell not in finished]
        return cls(
            folder.name, results, missing, manifest.processes, manifest.threads,
            manifest.design, _sweeps(folder, manifest),
        )  # fmt: skip

    @property
    def numbers_of_seeds(self) -> list[int]:
        """The different numbers of finished runs that contenders have, in rising order."""
        return sorted({len(result.runs) for result in self.results})

    @property
    def seeds_told(self) -> str:
        """`5 seeds`, or `2 to 5 seeds`."""
        fewest, most = self.numbers_of_seeds[0], self.numbers_of_seeds[-1]
        told = f"{most}" if fewest == most else f"{fewest} to {most}"
        return f"{told} seed{'s' if most > 1 else ''}"

    @property
    def reference(self) -> Result:
        """The contender with which the others are compared: the first."""
        return self.results[0]

    @property
    def domains(self) -> list[str]:
        """The domains of the held-out text."""
        return list(self.reference.first.final)


def _sweeps(folder: StudyFolder, manifest: StudyManifest) -> dict[str, Sweep]:
    if not manifest.design.lr_grid:
        return {}
    return {name: read_sweep(folder, manifest, name) for name in manifest.contenders}
