"""The coefficient of a loss, which a controller multiplies or divides after each step."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config.selection.time_constant import TimeConstant, steps_between

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
