"""What paired differences show: t intervals, tests of equivalence, Holm's correction.

The unit is a seed. D_j is a contender's loss minus the reference's with seed j, j = 1..m, with
mean D and sample standard deviation s; t has m - 1 degrees of freedom.

    interval      D -+ t_(1 + level) / 2 * s / sqrt(m)
    difference    p = P(|t| >= |D| sqrt(m) / s), two-sided. Beyond the margin M: with |D| - M
    equivalence   two one-sided tests (TOST; Schuirmann 1987) of D <= -M and D >= M. p is the larger
                  of the two, and p < .05 exactly if the 90% interval lies inside (-M, M)
    Holm (1979)   of k sorted p-values the i-th (from 1) times k - i + 1, at most 1, never below the
                  one before: below .05, the chance of any false difference among all k is < .05

scipy has Student's distribution. It is optional: only studies that state a margin need it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moe_parallel.optional import import_optional

LEVEL = 0.05  # of every test
_WANTED_BY = "study: margin"
_Name = TypeVar("_Name", bound=Hashable)


def student() -> Any:
    """Student's t distribution of scipy. Raises InputError if scipy is not installed."""
    return import_optional("scipy.stats", _WANTED_BY).t


@dataclass(frozen=True)
class PairedTest:
    """The statistics of at least two paired differences, in nats per token.

    low, high: the 95% interval; low_90, high_90: the 90% interval. The p-values, not corrected:
    `p` of no difference, `p_beyond` of a difference of at most the margin, `p_equivalent` of one of
    at least the margin.
    """

    mean: float
    deviation: float
    runs: int
    low: float
    high: float
    low_90: float
    high_90: float
    p: float
    p_beyond: float
    p_equivalent: float

    @classmethod
    def of(cls, differences: Sequence[float], margin: float) -> PairedTest:
        mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
        runs = len(differences)
        half = half_width(runs, 0.95) * deviation
        half_90 = half_width(runs, 0.90) * deviation
        return cls(
            mean, deviation, runs,
            mean - half, mean + half,
            mean - half_90, mean + half_90,
            2 * _tail(abs(mean), deviation, runs),
            min(1.0, 2 * _tail(abs(mean) - margin, deviation, runs)),
            _tail(margin - abs(mean), deviation, runs),
        )  # fmt: skip

    @property
    def is_equivalent(self) -> bool:
        return self.p_equivalent < LEVEL


def half_width(runs: int, level: float) -> float:
    """Half the width of the interval of the mean of `runs` differences, in their standard
    deviations: .95 for five runs at level .90."""
    return float(student().ppf((1 + level) / 2, runs - 1)) / math.sqrt(runs)


def _tail(distance: float, deviation: float, runs: int) -> float:
    """P(t >= distance / standard error). Without any spread, the distance itself decides."""
    if deviation == 0:
        return 0.5 if distance == 0 else 1.0 if distance < 0 else 0.0
    return float(student().sf(distance * math.sqrt(runs) / deviation, runs - 1))


def holm(p_values: Mapping[_Name, float]) -> dict[_Name, float]:
    """The p-values, by name, corrected for multiple comparisons."""
    corrected: dict[_Name, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}
