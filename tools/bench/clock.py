"""The clocks: process CPU time on a CPU, events on a GPU (tools/bench/cuda_clock.py). Caches are
emptied before each timing.

On a shared machine, wall time says little, but the CPU time of one thread measures the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

MIB = 1 << 20
LARGEST_SCRATCH = 512 * MIB
LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@dataclass(frozen=True)
class WorkTimer:
    """Times the same work at every call.

    without_graph: the reason why it is no replay of a CUDA graph; None for a replay, and where none
        was wanted.
    """

    seconds: Callable[[], float]
    without_graph: str | None = None

    def __call__(self) -> float:
        return self.seconds()


class WorkClock(Protocol):
    def timer(
        self, work: Callable[..., object], prepare: Callable[[], Sequence[Any]] = tuple
    ) -> WorkTimer:
        """Times `work(*prepare())`. Only the work counts, and it starts with an empty cache."""


class CpuClock:
    """Process CPU time; the work is expected to run on one thread."""

    def __init__(self) -> None:
        self.scratch = torch.ones(_cache_to_empty() // 4)

    def timer(
        self, work: Callable[..., object], prepare: Callable[[], Sequence[Any]] = tuple
    ) -> WorkTimer:
        def seconds() -> float:
            given = prepare()
            self.scratch.sum()  # read, not written: write-back of the cache would slow the work
            before = time.process_time()
            result = work(*given)
            after = time.process_time()
            del result  # freeing it is no part of the work
            return after - before

        return WorkTimer(seconds)


def work_clock_of(device: str, *, replays: bool = True) -> WorkClock:
    """`replays`: on a GPU, short work is captured as a CUDA graph, and its replay is timed."""
    if device == "cpu":
        return CpuClock()
    from tools.bench.cuda_clock import CudaClock

    return CudaClock(replays)


def _cache_to_empty() -> int:
    """Bytes to touch so that the last-level cache holds nothing else: twice its size.

    The limit is LARGEST_SCRATCH, because a process may get only a part of a shared server's cache.
    """
    try:
        size = int(LAST_LEVEL_CACHE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        size = 32 * MIB
    return min(2 * size, LARGEST_SCRATCH)
