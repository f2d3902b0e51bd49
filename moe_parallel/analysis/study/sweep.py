"""The learning-rate sweep of a contender: its pilot runs, and the rate that they recommend.

Every contender has the same number of pilot runs: those of the grid, and one that follows from
their losses. If the best rate is at an edge of the grid, the further run is one step beyond the
edge; otherwise it is halfway (in logarithm) between the best rate and the better of its neighbors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_parallel.analysis.study.contenders import Contender, Options
from moe_parallel.errors import InputError


@dataclass(frozen=True)
class Sweep:
    """`grid`: rates in rising order. `losses`: of the pilot runs that have ended, by rate; infinite
    if training diverged."""

    grid: tuple[float, ...]
    losses: Mapping[float, float]

    @property
    def further(self) -> float | None:
        """The rate of the further run. None: the grid is not finished."""
        if any(rate not in self.losses for rate in self.grid):
            return None
        best = self._place_of_the_best(self.grid)
        if best == 0:
            return rounded(self.grid[0] ** 2 / self.grid[1])
        if best == len(self.grid) - 1:
            return rounded(self.grid[-1] ** 2 / self.grid[-2])
        neighbors = self.grid[best - 1], self.grid[best + 1]
        return rounded(math.sqrt(self.grid[best] * min(neighbors, key=self.losses.__getitem__)))

    @property
    def rates(self) -> list[float]:
        """The rates that are known so far, in rising order."""
        return sorted({*self.grid, *([] if self.further is None else [self.further])})

    @property
    def is_finished(self) -> bool:
        return self.further in self.losses

    @property
    def best(self) -> float | None:
        """The rate with the lowest loss; of several, the lowest rate.

        None: a run is not finished, or all diverged.
        """
        if not self.is_finished:
            return None
        best = self.rates[self._place_of_the_best(self.rates)]
        return best if math.isfinite(self.losses[best]) else None

    @property
    def best_is_at_an_edge(self) -> bool:
        """Whether a rate beyond those tried might be better."""
        return self.best in (self.rates[0], self.rates[-1])

    def as_json(self) -> dict[str, Any]:
        """The rates, the loss at each (None: diverged), and the best."""
        losses = {f"{r:g}": x if math.isfinite(x) else None for r, x in self.losses.items()}
        return {"grid": list(self.grid), "losses": losses, "best": self.best}

    def _place_of_the_best(self, rates: Sequence[float]) -> int:
        return min(range(len(rates)), key=lambda place: self.losses[rates[place]])


def rounded(rate: float) -> float:
    """The rate with four digits, as files and folders name it."""
    return float(f"{rate:.4g}")


def grid_of(contender: Contender, factors: Sequence[float]) -> tuple[float, ...]:
    """The rates of the contender's grid: multiples of its own rate. Raises InputError if that is
    0."""
    if not (own := contender.config.optimizer.lr):
        raise InputError(f"contender {contender.name}: --lr is 0, and a grid needs a rate above 0")
    return tuple(rounded(own * factor) for factor in factors)


def lr_options(contender: Contender, rate: float) -> Options:
    """The options of a run at this rate. The whole schedule is scaled, so its shape stays."""
    optimizer = contender.config.optimizer
    return {"lr": rate, "min_lr": rounded(optimizer.min_lr * rate / optimizer.lr)}
