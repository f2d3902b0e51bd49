"""Which contenders of a study are compared, and the tests of their differences."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from moe_parallel.analysis.study.inference import LEVEL, PairedTest, holm
from moe_parallel.analysis.study.measures import judged_loss
from moe_parallel.analysis.study.results import Result, StudyResults
from moe_parallel.config import Config

CONTROL_WITHIN = 0.02  # of the experts per token that the configuration asks for


@dataclass(frozen=True)
class Comparison:
    """A contender's losses minus those of another, seed by seed. `p` and `p_beyond`: those of the
    test, corrected for the number of comparisons (Holm)."""

    name: str
    other: str
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
    of_pairs: those of the pairs that the design states, in order.
    equivalent_pairs, pairs: the equivalent ones among all pairs of contenders that are compared,
    the reference included, and the number of all.
    """

    margin: float
    compared: dict[str, Comparison]
    only_reported: dict[str, str]
    of_pairs: list[Comparison]
    equivalent_pairs: list[tuple[str, str]]
    pairs: int

    @classmethod
    def of(cls, study: StudyResults) -> Comparisons | None:
        """None if the design states no margin."""
        if (margin := study.design.margin) is None:
            return None
        told = _reasons(study)
        losses = {r.name: _losses(study, r) for r in study.results if r.name not in told}
        first = study.reference.name
        all_pairs = list(itertools.combinations(losses, 2))
        stated = [(other, one) for one, other in study.design.pairs if {one, other} <= {*losses}]
        tests = {}  # of the losses of b minus those of a, by (a, b)
        for a, b in (*all_pairs, *stated):
            seeds = sorted(losses[a].keys() & losses[b].keys())
            if len(seeds) > 1:
                tests[a, b] = PairedTest.of([losses[b][s] - losses[a][s] for s in seeds], margin)
        with_first = {b: (a, b) for a, b in all_pairs if a == first and (a, b) in tests}
        for name in losses.keys() - with_first.keys() - {first}:
            told[name] = f"it and {first} have fewer than two finished seeds in common"
        for a, b in stated:
            if (a, b) not in tests:
                told[f"{b} against {a}"] = "they have fewer than two finished seeds in common"
        found = _corrected({p: tests[p] for p in (*with_first.values(), *stated) if p in tests})
        tested = [pair for pair in all_pairs if pair in tests]
        return cls(
            margin,
            {name: found[pair] for name, pair in with_first.items()},
            told,
            [found[pair] for pair in stated if pair in found],
            [pair for pair in tested if tests[pair].is_equivalent],
            len(tested),
        )


def _corrected(tests: dict[tuple[str, str], PairedTest]) -> dict[tuple[str, str], Comparison]:
    p = holm({pair: test.p for pair, test in tests.items()})
    beyond = holm({pair: test.p_beyond for pair, test in tests.items()})
    return {(a, b): Comparison(b, a, test, p[a, b], beyond[a, b]) for (a, b), test in tests.items()}


def term_values(study: StudyResults) -> dict[str, float | None]:
    """What the terms of the design hold equal, as measured, by contender."""
    terms = study.design.terms
    return {r.name: terms.value(r.contender, r.parameters, _means(r)) for r in study.results}


def _reasons(study: StudyResults) -> dict[str, str]:
    """Why contenders are only reported, by name."""
    first = study.reference
    if (reason := _why_only_reported(study, first)) is not None:
        others = f"{first.name}, with which it would be compared, is itself only reported"
        return {r.name: reason if r is first else others for r in study.results}
    reasons = {r.name: _why_only_reported(study, r) for r in study.results}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _why_only_reported(study: StudyResults, result: Result) -> str | None:
    """Why this contender is not compared. None: it is."""
    design = study.design
    if (reason := _why_no_likelihood(result.contender.config, design.judged_by)) is not None:
        return reason
    if not _losses(study, result):
        return f"its evaluations have no {design.judged_by.replace('_', ' ')} (--eval-first-part)"
    experts, asked = _means(result).get("experts_per_token"), _asked(result)
    if asked is not None and experts is not None and _off(experts, asked) > CONTROL_WITHIN:
        return (
            f"it uses {experts:.3f} experts per token on held-out text, {_percent(experts, asked)} "
            f"the {asked:g} of its configuration"
        )
    values, first = term_values(study), study.reference.name
    ours, its = values[result.name], values[first]
    if ours is not None and its is not None and _off(ours, its) > design.terms.tolerance:
        return f"its {design.terms.told} are {ours:,.4g}, {_percent(ours, its)} those of {first}"
    return None


def _why_no_likelihood(config: Config, judged_by: str) -> str | None:
    """Why the loss is not the likelihood of the text. None: it is."""
    settled = config.settled_after
    if settled is None:
        return "its loss depends on later tokens, so it is not the likelihood of the text"
    omitted = (config.first_part or 0) if judged_by == "loss_after_first_part" else 0
    if settled > omitted:
        return (
            f"its loss on the first {settled} tokens of a sequence depends on later tokens; "
            "judged-by: loss_after_first_part omits them"
        )
    return None


def _losses(study: StudyResults, result: Result) -> dict[int, float]:
    """The loss that is judged, by seed."""
    found = {s: judged_loss(run, study.design.judged_by) for s, run in result.measures.items()}
    return {seed: loss for seed, loss in found.items() if loss is not None}


def _means(result: Result) -> dict[str, float]:
    return {name: spread.mean for name, spread in result.spreads.items()}


def _asked(result: Result) -> float | None:
    """The experts per token of the configuration. None: it says nothing, or there are none."""
    return None if result.is_dense else result.contender.config.selection.mean_choices


def _off(value: float, target: float) -> float:
    return abs(value / target - 1)


def _percent(value: float, target: float) -> str:
    return f"{abs(value / target - 1):.1%} {'above' if value > target else 'below'}"
