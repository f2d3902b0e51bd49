"""The time at which a run leaves by itself: --exit-duration-in-mins."""

from __future__ import annotations

import os
import time

import psutil  # type: ignore[import-untyped]

from moe_parallel.training.job_store import STARTED


class Deadline:
    """Counts the minutes since the start of the job, also for ranks that were started anew in it.

    So the limit is that of a batch job.
    """

    def __init__(self, minutes: float | None) -> None:
        """`minutes`: None: there is no limit."""
        self._last = time.monotonic()
        self._longest = 0.0
        self._end = None if minutes is None else self._last - _age() + 60 * minutes

    def is_near(self) -> bool:
        """Whether the limit would pass before the next call, which comes one step later.

        The time to the next call is taken to be the longest between two calls so far, which
        includes evaluations and checkpoints that training waited for.
        """
        if self._end is None:
            return False
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        return now + self._longest > self._end


def _age() -> float:
    """Seconds since the job began, as its launcher or job script says, or else this process."""
    began = os.environ.get(STARTED) or psutil.Process().create_time()
    return max(0.0, time.time() - float(began))
