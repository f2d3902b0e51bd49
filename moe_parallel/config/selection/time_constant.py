"""The states of a system that move from step to step, and how fast they move.

A state that needs 1,000 steps does nothing in a run of 200. A default that is right for a long run
therefore says nothing about a system in a short one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: A run says something of a system if the time constants of its states are at most this share of
#: its steps.
MOST_OF_A_RUN = 0.25
#: The share of its steps over which a state averages if its memory is set by the length of a run.
MEMORY_OF_A_RUN = 0.05


@dataclass(frozen=True)
class TimeConstant:
    """How many steps a state needs to reach its value."""

    state: str  # its name for users
    steps: float
    remedy: str  # what makes it faster

    def note(self, train_iters: int) -> str:
        """A line for users, of a run of so many steps."""
        share = self.steps / train_iters
        return (
            f"{self.state}: time constant {self.steps:,.0f} steps, {share:.2g} of --train-iters "
            f"{train_iters}"
        )

    def warning(self, train_iters: int) -> str | None:
        """Why a run of so many steps says little about the state. None: it is long enough."""
        if self.steps <= MOST_OF_A_RUN * train_iters * (1 + 1e-9):  # beyond rounding
            return None
        return (
            f"{self.note(train_iters)}, which is above {MOST_OF_A_RUN}: the run says little about "
            f"it; {self.remedy}, or train longer"
        )


def steps_between(start: float, end: float, factor: float) -> float:
    """The steps from one positive number to another, by this factor in each; the factor is > 1."""
    return abs(math.log(end / start)) / math.log(factor)


def kept_share(steps: float) -> float:
    """The share of its value that an average over so many steps keeps in each; at least 0."""
    return max(0.0, 1 - 1 / steps)


_REACHED = 1e-3  # the coefficient that a run should reach early


_WITHIN = 0.05  # the share of the run in which it should


@dataclass(frozen=True)
class MovingCoefficient:
    """The options of such a coefficient, lambda."""

    loss: str  # its name for users
    flags: str  # what the flags of `init` and `multiplier` begin with
    init: float | None  # None: by the length of the run
    multiplier: float
    least_init: float  # of an init by the length of the run; the paper's

    def initial(self, train_iters: int | None) -> float:
        """lambda in the first step of a run of so many iterations. None: no run."""
        if self.init is not None:
            return self.init
        if train_iters is None:
            return self.least_init
        growth = self.multiplier ** -(_WITHIN * train_iters)
        return max(self.least_init, _REACHED * growth)

    def time_constant(self, train_iters: int) -> TimeConstant:
        initial = self.initial(train_iters)
        remedy = (
            f"set {self.flags}-init (now {initial:.3g}) nearer to {_REACHED:g} (none: by the "
            f"length of the run) or raise {self.flags}-multiplier"
        )
        steps = steps_between(initial, _REACHED, self.multiplier)
        return TimeConstant(f"coefficient of the {self.loss}", steps, remedy)
