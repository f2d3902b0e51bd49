"""The time at which a run leaves by itself: --exit-duration-in-mins."""

from __future__ import annotations

import contextlib
import os
import time

import psutil  # type: ignore[import-untyped]

from moe_parallel.training.job_store import LAUNCHER


class Deadline:
    """Counts the minutes since the start of the job on this node: of its launcher, if it has one.

    So the limit is that of a batch job, also for ranks that --max-restarts starts anew.
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
    """Seconds since the launcher of this process, or this process itself, was started."""
    started = psutil.Process().create_time()
    with contextlib.suppress(psutil.NoSuchProcess, KeyError):
        started = psutil.Process(int(os.environ[LAUNCHER])).create_time()
    return float(max(0.0, time.time() - started))
