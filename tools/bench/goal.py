"""A goal for one row of a run, and the verdict on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tools.bench.contender import OURS
from tools.bench.results import BenchPlace, BenchResult, BenchRow, times_as_fast

SHARE, SPEED = "of the ceiling", "as fast as"
SAVED, PEAK = "the saved bytes of", "the peak memory of"
TOKEN_TIME, TOKEN_SAVED = "the time of a token", "the saved bytes of a token"
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
    def other_key(self) -> tuple[str, str, str, str]:
        """The key of the row in which `other` is."""
        return self.key

    @property
    def against(self) -> str:
        """What follows `figure` in words."""
        return self.other

    def value(self, one: BenchResult, other: BenchResult) -> float:
        if self.figure == SAVED:
            return one.saved_bytes / other.saved_bytes
        if self.figure == PEAK:
            return one.peak_bytes / other.peak_bytes
        return times_as_fast(one, other)  # a share is the speed against the ceiling

    @property
    def at_most(self) -> bool:
        return self.figure not in (SHARE, SPEED)

    @property
    def sign(self) -> str:
        return "<=" if self.at_most else ">="

    def shown(self, value: float) -> str:
        return f"{100 * value:.1f}%" if self.figure == SHARE else f"{value:.3f}x"


@dataclass(frozen=True, kw_only=True)
class GrowthGoal(Goal):
    """TOKEN_TIME or TOKEN_SAVED of `contender` may be at most `bound` times that of `other`, the
    same contender, in the row of the size `before`.

    tokens, before_tokens: the tokens of a pass in this row, and in the other one.
    """

    before: str
    tokens: int
    before_tokens: int

    @property
    def other_key(self) -> tuple[str, str, str, str]:
        return replace(self, size=self.before).key

    @property
    def against(self) -> str:
        return f"at {self.before}"

    def value(self, one: BenchResult, other: BenchResult) -> float:
        if self.figure == TOKEN_SAVED:
            grown = one.saved_bytes / other.saved_bytes
        else:  # the rows were not measured in turns
            grown = one.median / other.median
        return grown * self.before_tokens / self.tokens


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
        figure = f"{goal.figure} {goal.against}".rstrip() + best
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


def judge(goal: Goal, rows: Sequence[BenchRow]) -> Verdict:
    row, other_row = _at(goal.key, rows), _at(goal.other_key, rows)
    if row is None:
        return Verdict(goal, reason="the row was not part of this run")
    if other_row is None:
        return Verdict(goal, reason="the other row was not part of this run")
    one = row.result(goal.contender)
    other = _other(goal, other_row)
    for name, result in ((goal.contender, one), (goal.other, other)):
        if result is None:
            return Verdict(goal, reason=f"{name} took no part")
        if result.absent is not None:
            return Verdict(goal, reason=f"{name} is absent: {result.absent}")
        if result.differs is not None:
            return Verdict(goal, reason=f"{name} DIFFERS: {result.differs}")
    best = other.name if goal.other == BEST else ""
    return Verdict(goal, goal.value(one, other), best=best)


def _at(key: tuple[str, str, str, str], rows: Sequence[BenchRow]) -> BenchRow | None:
    """The first: a size of the goals may be in a curve, too, with other contenders."""
    return next((row for row in rows if row.key == key), None)


def _other(goal: Goal, row: BenchRow) -> BenchResult | None:
    if not goal.other:
        return row.ceiling
    if goal.other != BEST:
        return row.result(goal.other)
    peers = [result for result in row.results if not result.name.startswith(OURS)]
    measured = [peer for peer in peers if peer.absent is None and peer.differs is None]
    return min(measured, key=lambda peer: peer.median, default=None)
