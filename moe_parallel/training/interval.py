"""The averages of a log line: over the iterations since the previous line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_parallel.errors import InputError
from moe_parallel.telemetry.statistics import RoutingStatistics, RoutingTotals
from moe_parallel.training.engine import StepResult


class Interval:
    """Sums over the iterations since the last log line, and over all ranks.

    A checkpoint between two log lines contains the sums, as `state`. Every step is summed over the
    ranks before it is added. So a run that continues makes the same additions, with the same
    rounding, as a run that was never stopped.
    """

    def __init__(self, statistics: RoutingStatistics, state: Mapping[str, Any] | None) -> None:
        """`state`: of an earlier interval with the same layers and experts; None: start empty.

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
                "--load: the checkpoint's sums of unlogged iterations have the wrong "
                f"format ({type(error).__name__}); load another checkpoint"
            ) from error

    def clear(self) -> None:
        """Start anew: everything so far has been logged."""
        self._losses, self._iterations, self._tokens, self._seconds = 0.0, 0, 0, 0.0
        self._statistics.training.clear()
        self._routing = RoutingTotals.zeros_like(self._statistics.training)

    def add(self, result: StepResult, seconds: float) -> None:
        """Add one iteration and its routing statistics. Collective."""
        self._losses += result.lm_loss
        self._iterations += 1
        self._tokens += result.tokens
        self._seconds += seconds
        self._routing.add_totals(self._statistics.training.reduced([None]))
        self._statistics.training.clear()

    def averages(self) -> dict[str, float]:
        """The averages over at least one iteration; the loss is in nats per token."""
        return {
            "lm_loss": self._losses / self._iterations,
            "tokens_per_second": self._tokens / self._seconds,
        }

    def layers(self) -> list[dict[str, Any]]:
        """The routing statistics of each layer: `RoutingTotals.summaries`."""
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
