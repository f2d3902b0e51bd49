"""What a logged line averages: the iterations since the one before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_parallel.errors import InputError
from moe_parallel.telemetry.statistics import RoutingStatistics, RoutingTotals
from moe_parallel.training.engine import StepResult


class Interval:
    """Sums over the iterations that no line has told of yet, and over all ranks.

    A checkpoint between two logged iterations carries them, as `state`. Every step is summed over
    the ranks before it is added, so that a run that goes on makes the additions, and so the
    roundings, of a run that was never stopped.
    """

    def __init__(self, statistics: RoutingStatistics, state: Mapping[str, Any] | None) -> None:
        """`state`: of an earlier interval with the same layers and experts; None: an empty one.

        Raises:
            InputError: `state` is something else.
        """
        self._statistics = statistics
        self.clear()
        if state is None:
            return
        try:
            self._losses = float(state["losses"])
            self._iterations = int(state["iterations"])
            self._tokens = int(state["tokens"])
            self._seconds = float(state["seconds"])
            self._routing.load_state(state["routing"])
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise InputError(
                "--load: the checkpoint's sums of the iterations that no line has told of are of "
                f"another kind ({type(error).__name__}); load another checkpoint"
            ) from error

    def clear(self) -> None:
        """Begin anew: everything so far has been logged."""
        self._losses, self._iterations, self._tokens, self._seconds = 0.0, 0, 0, 0.0
        self._statistics.training.clear()
        self._routing = RoutingTotals.zeros_like(self._statistics.training)

    def add(self, result: StepResult, seconds: float) -> None:
        """Add an iteration, and how its tokens were routed. Collective."""
        self._losses += result.lm_loss
        self._iterations += 1
        self._tokens += result.tokens
        self._seconds += seconds
        self._routing.add_totals(self._statistics.training.reduced([None]))
        self._statistics.training.clear()

    def averages(self) -> dict[str, float]:
        """Of at least one iteration; the loss in nats a token."""
        return {
            "lm_loss": self._losses / self._iterations,
            "tokens_per_second": self._tokens / self._seconds,
        }

    def layers(self) -> list[dict[str, Any]]:
        """How each layer routed its tokens: `RoutingTotals.summaries`."""
        return self._routing.summaries()

    def state(self) -> dict[str, Any] | None:
        """The sums in JSON's types, the same on every rank; None if there are none."""
        if not self._iterations:
            return None
        return {
            "losses": self._losses,
            "iterations": self._iterations,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "routing": self._routing.state(),
        }
