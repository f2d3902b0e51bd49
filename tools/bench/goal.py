"""A goal for one row of a run, and the verdict on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from tools.bench.contender import OURS
from tools.bench.results import BenchPlace, BenchResult, BenchRow, times_as_fast

SHARE, SPEED = "of the ceiling", "as fast as"
SAVED, PEAK = "the saved bytes of", "the peak memory of"
BEST = "the fastest peer"


@dataclass(frozen=True)
class Goal(BenchPlace):
    """On one row, `figure` of `contender` must be at least (for memory at most) `bound`.

    figure: SHARE, or SPEED, SAVED or PEAK against the contender `other` of the same row. If `other`
        is BEST, it is the fastest of all contenders that are not ours.
    """

    figure: str
    bound: float
    other: str = ""
    contender: str = OURS

    @property
    def at_most(self) -> bool:
        return self.figure in (SAVED, PEAK)

    @property
    def sign(self) -> str:
        return "<=" if self.at_most else ">="

    def shown(self, value: float) -> str:
        return f"{100 * value:.1f}%" if self.figure == SHARE else f"{value:.3f}x"


@dataclass(frozen=True)
class Verdict:
    """value: the measured value; None, with the reason, if there is none.
    best: the contender that BEST stands for."""

    goal: Goal
    value: float | None = None
    reason: str = ""
    best: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        if self.goal.at_most:
            return self.value <= self.goal.bound
        return self.value >= self.goal.bound

    def __str__(self) -> str:
        """The verdict without the row, which `format_verdicts` names."""
        goal = self.goal
        best = f" ({self.best})" if self.best else ""
        figure = f"{goal.figure} {goal.other}".rstrip() + best
        bound = f"{goal.sign} {goal.shown(goal.bound)}"
        if self.value is None:
            return f"{'not measured':<14}{goal.contender}: {figure} {bound}: {self.reason}"
        shown = f"{goal.contender}: {goal.shown(self.value)} {figure} (goal {bound}"
        if self.met:
            return f"{'met':<14}{shown})"
        off = 100 * (self.value / goal.bound - 1)
        return f"{'missed':<14}{shown}: {abs(off):.1f}% {'over' if off > 0 else 'short'})"


def format_verdicts(verdicts: Iterable[Verdict]) -> str:
    """The verdicts on each row under its title."""
    lines = []
    for title, on_row in groupby(verdicts, key=lambda verdict: verdict.goal.title):
        lines += [f"  {title}", *(f"    {verdict}" for verdict in on_row)]
    return "\n".join(lines)


def judge(goal: Goal, rows: Iterable[BenchRow]) -> Verdict:
    row = next((row for row in rows if row.key == goal.key), None)
    if row is None:
        return Verdict(goal, reason="the row was not part of this run")
    one = row.result(goal.contender)
    other = _other(goal, row)
    for name, result in ((goal.contender, one), (goal.other, other)):
        if result is None:
            return Verdict(goal, reason=f"{name} took no part")
        if result.absent is not None:
            return Verdict(goal, reason=f"{name} is absent: {result.absent}")
        if result.differs is not None:
            return Verdict(goal, reason=f"{name} DIFFERS: {result.differs}")
    best = other.name if goal.other == BEST else ""
    return Verdict(goal, _figure(goal.figure, one, other), best=best)


def _other(goal: Goal, row: BenchRow) -> BenchResult | None:
    if not goal.other:
        return row.ceiling
    if goal.other != BEST:
        return row.result(goal.other)
    peers = [result for result in row.results if not result.name.startswith(OURS)]
    measured = [peer for peer in peers if peer.absent is None and peer.differs is None]
    return min(measured, key=lambda peer: peer.median, default=None)


def _figure(figure: str, one: BenchResult, other: BenchResult) -> float:
    if figure == SAVED:
        return one.saved_bytes / other.saved_bytes
    if figure == PEAK:
        return one.peak_bytes / other.peak_bytes
    return times_as_fast(one, other)  # a share is the speed against the ceiling
