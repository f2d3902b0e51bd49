"""The clocks: process CPU time on a CPU, events on a GPU. Caches are emptied before each timing.

On a shared machine, wall time says little, but the CPU time of one thread measures the work.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

MIB = 1 << 20
LARGEST_SCRATCH = 512 * MIB
LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


class Clock(Protocol):
    def seconds(self, work: Callable[[], object]) -> tuple[float, Any]:
        """The time of the work, which starts with an empty cache, and its result."""


class CpuClock:
    """Process CPU time; the work is expected to run on one thread."""

    def __init__(self) -> None:
        self.scratch = torch.ones(_cache_to_empty() // 4)

    def seconds(self, work: Callable[[], object]) -> tuple[float, Any]:
        self.scratch.sum()  # read, not written: write-back of the cache would slow the work
        before = time.process_time()
        result = work()
        return time.process_time() - before, result


class CudaClock:
    """Time between two events on the current stream."""

    def __init__(self) -> None:
        self.scratch = torch.zeros(256 * MIB // 4, device="cuda")

    def seconds(self, work: Callable[[], object]) -> tuple[float, Any]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.scratch.zero_()
        start.record()
        result = work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, result


def clock_of(device: str) -> Clock:
    return CudaClock() if device == "cuda" else CpuClock()


def _cache_to_empty() -> int:
    """Bytes to touch so that the last-level cache holds nothing else: twice its size.

    The limit is LARGEST_SCRATCH, because a process may get only a part of a shared server's cache.
    """
    try:
        size = int(LAST_LEVEL_CACHE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        size = 32 * MIB
    return min(2 * size, LARGEST_SCRATCH)


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next allocation, as torch does on a GPU.

    Otherwise every tensor beyond 32 MiB is new memory. The page faults of its first use can take
    longer than a permute, and would count for the contender that allocates. Returns False if the C
    library has no such setting.
    """
    trim_threshold, map_at_most = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(map_at_most, 0)) and bool(mallopt(trim_threshold, -1))  # -1: never trim
