"""The measurements of the finished runs of a study, who is compared, and the tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.study.contenders import DENSE, Contender
from moe_parallel.analysis.study.design import EQUAL_WITHIN, StudyDesign
from moe_parallel.analysis.study.folder import Cell, StudyFolder, Sweep, read_sweep
from moe_parallel.analysis.study.measures import (
    LEVEL,
    PairedTest,
    RunMeasures,
    Spread,
    holm,
    judged_loss,
    measures,
    spreads,
)
from moe_parallel.config import Config
from moe_parallel.errors import InputError

#: Key in a contender's parameters: the experts per token with which its active parameters are
#: counted, if training decided that number.
MEASURED = "experts_per_token"
CONTROL_WITHIN = 0.02  # of the experts per token that the configuration asks for


@dataclass(frozen=True)
class Run:
    """A finished run."""

    history: RunHistory
    measures: RunMeasures
    attempts: list[dict[str, Any]]


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

    @cached_property
    def means(self) -> RunMeasures:
        return {name: spread.mean for name, spread in self.spreads.items()}

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
            history = RunHistory.from_records(cell.records())
            run = Run(history, measures(history), cell.attempts())
            runs.setdefault(cell.contender, {})[cell.seed] = run
        results = [
            Result(manifest.settled(name), manifest.parameters.get(name, {}), runs[name])
            for name in manifest.contenders
            if name in runs
        ]
        swept = manifest.contenders if manifest.design.lr_grid else ()
        return cls(
            folder.name, results, [cell for cell in cells if cell not in finished],
            manifest.processes, manifest.threads, manifest.design,
            {name: read_sweep(folder, manifest, name) for name in swept},
        )  # fmt: skip

    @property
    def seeds_told(self) -> str:
        """`5 seeds`, or `2 to 5 seeds`: those of finished runs."""
        numbers = [len(result.runs) for result in self.results]
        fewest, most = min(numbers), max(numbers)
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

    @property
    def term_values(self) -> dict[str, float | None]:
        """What the terms of the design hold equal, as measured, by contender."""
        value = self.design.terms.value
        return {r.name: value(r.contender, r.parameters, r.means) for r in self.results}


@dataclass(frozen=True)
class Comparison:
    """A contender's losses minus those of the reference, seed by seed. `p` and `p_beyond`: those of
    the test, corrected for the number of comparisons (Holm)."""

    name: str
    differences: list[float]
    test: PairedTest
    p: float
    p_beyond: float

    @property
    def verdict(self) -> str:
        """What the tests say, in a few words."""
        better = "better" if self.test.mean < 0 else "worse"
        if self.p_beyond < LEVEL:
            return f"{better} by more than the margin"
        if self.p < LEVEL:
            return f"{better} by less than the margin" if self.test.is_equivalent else better
        return "equivalent" if self.test.is_equivalent else "not decided"


@dataclass(frozen=True)
class Comparisons:
    """The comparisons of a study.

    margin: of the design, in nats per token.
    compared: those with the reference, in order. only_reported: why others are not. By name.
    """

    margin: float
    compared: dict[str, Comparison]
    only_reported: dict[str, str]

    @classmethod
    def of(cls, study: StudyResults) -> Comparisons | None:
        """None if the design states no margin."""
        if (margin := study.design.margin) is None:
            return None
        told, first, minus, tests = _reasons(study), study.reference, {}, {}
        its = _losses(study, first)
        for each in study.results:
            if each is first or each.name in told:
                continue
            losses = _losses(study, each)
            seeds = sorted(losses.keys() & its.keys())
            if len(seeds) > 1:
                minus[each.name] = [losses[s] - its[s] for s in seeds]
                tests[each.name] = PairedTest.of(minus[each.name], margin)
            else:
                few = "have fewer than two finished seeds in common"
                told[each.name] = f"it and {first.name} {few}"
        p = holm({name: test.p for name, test in tests.items()})
        beyond = holm({name: test.p_beyond for name, test in tests.items()})
        compared = {n: Comparison(n, minus[n], tests[n], p[n], beyond[n]) for n in tests}
        return cls(margin, compared, told)


def _losses(study: StudyResults, result: Result) -> dict[int, float]:
    """The loss that is judged, by seed."""
    found = {s: judged_loss(run, study.design.judged_by) for s, run in result.measures.items()}
    return {seed: loss for seed, loss in found.items() if loss is not None}


def _reasons(study: StudyResults) -> dict[str, str]:
    """Why contenders are only reported, by name."""
    reasons = {r.name: _why_only_reported(study, r) for r in study.results}
    first = study.reference.name
    if (reason := reasons[first]) is not None:
        others = f"{first}, with which it would be compared, is itself only reported"
        return dict.fromkeys(reasons, others) | {first: reason}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _why_only_reported(study: StudyResults, result: Result) -> str | None:
    """Why this contender is not compared. None: it is."""
    design, config, values = study.design, result.contender.config, study.term_values
    if (reason := _why_no_likelihood(config, design.judged_by)) is not None:
        return reason
    if not _losses(study, result):
        return f"its evaluations have no {design.judged_by.replace('_', ' ')} (--eval-first-part)"
    asked = None if result.is_dense else config.selection.mean_choices
    experts = result.means.get("experts_per_token")
    if asked is not None and experts is not None and abs(experts / asked - 1) > CONTROL_WITHIN:
        return (
            f"it uses {experts:.3f} experts per token on held-out text, {_percent(experts, asked)} "
            f"the {asked:g} of its configuration"
        )
    ours, its = values[result.name], values[study.reference.name]
    if ours is not None and its is not None and abs(ours / its - 1) > EQUAL_WITHIN:
        to = f"{_percent(ours, its)} those of {study.reference.name}"
        return f"its {design.terms.told} are {ours:,.4g}, {to}"
    return None


def _why_no_likelihood(config: Config, judged_by: str) -> str | None:
    """Why the loss is not the likelihood of the text. None: it is."""
    settled = config.settled_after
    if settled is None:
        return "its loss depends on later tokens, so it is not the likelihood of the text"
    if settled > ((config.first_part or 0) if judged_by == "loss_after_first_part" else 0):
        return (
            f"its loss on the first {settled} tokens of a sequence depends on later tokens; "
            "judged-by: loss_after_first_part omits them"
        )
    return None


def _percent(value: float, target: float) -> str:
    return f"{abs(value / target - 1):.1%} {'above' if value > target else 'below'}"
