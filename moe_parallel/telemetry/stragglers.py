"""The times of the ranks over some steps, and the rank that is slower than the others.

A rank's own time is a step without the phases in which it only exchanges data (`EXCHANGES`): there
a fast rank waits for a slow one, so every rank's step takes equally long. A rank is compared with
its peers, the other ranks of its pipeline stage, because other stages have other layers.

Two causes are distinguished. If a rank receives r times the rows of its peers, the rows can explain
at most r times their own time, because only part of the work grows with rows. A rank slower than
that is on a slow host.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_parallel.telemetry.progress import EXCHANGES, Phase

#: The phases of a step that are a rank's own work.
OWN = (
    Phase.STEP, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REPLAY, Phase.OPTIMIZER,
)  # fmt: skip
#: A rank is named if even its fastest step takes this many times the own time of its peers.
CLEAR = 1.2

HOST, TOKENS = "host", "tokens"


@dataclass(frozen=True)
class Member:
    """A rank of the job."""

    host: str
    stage: int  # of the pipeline


@dataclass(frozen=True)
class RankTimes:
    """Seconds a step of one rank, over the steps of an interval."""

    own: float  # the median of the steps
    least_own: float  # in the fastest step
    phases: Mapping[Phase, float]  # means
    rows: float  # received by this rank's experts a step

    @classmethod
    def of(cls, steps: Sequence[Mapping[Phase, float]], rows: int) -> RankTimes:
        """The times of at least one step."""
        own = [sum(step[phase] for phase in OWN) for step in steps]
        means = {
            phase: statistics.fmean(step[phase] for step in steps) for phase in OWN + EXCHANGES
        }
        return cls(statistics.median(own), min(own), means, rows / len(steps))


def summary(ranks: Sequence[RankTimes], members: Sequence[Member]) -> dict[str, Any]:
    """The field `ranks` of a metrics record.

    By rank: own_seconds, data_seconds (of these), dispatch_seconds (of waiting for other ranks'
    rows and sending them), reduce_seconds, pipeline_seconds, and rows. slowest is None if no rank
    has a peer. Otherwise it has rank, host, own_seconds, over_median (own_seconds over the median
    of the peers), phase (in which it loses most), rows, rows_of_others (their median), and cause:
    null, or `tokens` or `host` if the rank is clearly slower.
    """
    return {
        "own_seconds": [round(each.own, 6) for each in ranks],
        **{
            f"{phase.value}_seconds": [round(each.phases[phase], 6) for each in ranks]
            for phase in (Phase.DATA, *EXCHANGES)
        },
        "rows": [round(each.rows) for each in ranks],
        "slowest": _slowest(ranks, members),
    }


def _slowest(ranks: Sequence[RankTimes], members: Sequence[Member]) -> dict[str, Any] | None:
    def peers(rank: int) -> list[RankTimes]:
        stage = members[rank].stage
        others = (other for other, their in enumerate(members) if their.stage == stage)
        return [ranks[other] for other in others if other != rank]

    usual = {
        rank: statistics.median(peer.own for peer in of_rank)
        for rank in range(len(ranks))
        if (of_rank := peers(rank))
    }
    if not usual or not all(usual.values()):
        return None
    rank = max(usual, key=lambda each: ranks[each].own / usual[each])
    times, of_others = ranks[rank], usual[rank]
    rows_of_others = statistics.median(peer.rows for peer in peers(rank))
    lost = {
        phase: times.phases[phase] - statistics.median(peer.phases[phase] for peer in peers(rank))
        for phase in OWN
    }
    cause = None
    if times.least_own >= CLEAR * of_others:
        more_rows = times.rows > rows_of_others
        explained = times.own * rows_of_others <= of_others * times.rows
        cause = TOKENS if more_rows and explained else HOST
    return {
        "rank": rank,
        "host": members[rank].host,
        "own_seconds": round(times.own, 6),
        "over_median": round(times.own / of_others, 3),
        "phase": max(lost, key=lambda phase: lost[phase]).value,
        "rows": round(times.rows),
        "rows_of_others": round(rows_of_others),
        "cause": cause,
    }


class News:
    """Says which rank is clearly slower, when it has been so for a while, and not too often."""

    STEPS = 5  # in a row, and never those of the first interval, which builds what others reuse
    SECONDS = 600.0  # between two lines about the same rank and cause

    def __init__(self) -> None:
        self._first = True
        self._named: tuple[int, str] | None = None
        self._steps = 0
        self._told: dict[tuple[int, str], float] = {}

    def of(self, slowest: Mapping[str, Any] | None, steps: int, now: float) -> str | None:
        """A line about `slowest` of the interval's summary, if one is due.

        `steps`: in the interval. `now`: seconds, of a clock that does not go back.
        """
        first, self._first = self._first, False
        if first or slowest is None or slowest["cause"] is None:
            self._named, self._steps = None, 0
            return None
        named = (slowest["rank"], slowest["cause"])
        self._steps = steps + (self._steps if named == self._named else 0)
        self._named = named
        if self._steps < self.STEPS or now - self._told.get(named, -self.SECONDS) < self.SECONDS:
            return None
        self._told[named] = now
        cause = {
            HOST: "its host is slow",
            TOKENS: f"its experts receive {slowest['rows']:,} rows a step, and those of the others "
            f"{slowest['rows_of_others']:,}",
        }[slowest["cause"]]
        return (
            f"rank {slowest['rank']} on {slowest['host']} is {slowest['over_median']:.2f} times as "
            f"slow as its peers ({slowest['own_seconds']:.3g} s of its own a step, most of the "
            f"difference in {slowest['phase']}): {cause}"
        )
