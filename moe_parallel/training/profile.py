"""A profile of some training steps: a trace for a browser, tables, and one line that sums it up.

torch's profiler records every operator, kernel and copy of the steps that --profile-step-start and
--profile-step-end choose, on the ranks of --profile-ranks. SAVE/profile then has, for each of these
ranks, `iter_0000010_rank0.json.gz` (open it at https://ui.perfetto.dev) and a `.txt` with the
operators and kernels that took most time. Recording makes the steps slower, mostly those that the
host bounds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from moe_parallel.config import Config
from moe_parallel.config.message import counted

PROFILE_FOLDER = "profile"
_ROWS = 40  # of a table

#: Calls of the CUDA runtime and driver that start work, and those that wait for the device.
_LAUNCHES = (
    "cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync",
)  # fmt: skip
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Profile:
    """Records the chosen steps of this rank, and writes them down after the last."""

    def __init__(self, config: Config, rank: int) -> None:
        logging = config.logging
        self._first, self._end = logging.profile_step_start, logging.profile_step_end
        self._is_on = logging.profile and rank in logging.profile_ranks
        self._folder = Path(config.checkpoint.save or ".") / PROFILE_FOLDER
        self._rank = rank
        self._profiler: torch.profiler.profile | None = None
        self._began, self._steps, self._iteration = 0.0, 0, 0

    def begin_step(self, iteration: int) -> None:
        """The step `iteration` (from 1 on) begins."""
        if not self._is_on or self._profiler or not self._first <= iteration < self._end:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own messages
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._began, self._steps, self._iteration = time.perf_counter(), 0, iteration

    def end_step(self, iteration: int, *, is_last: bool) -> str | None:
        """The step is over, and `is_last` if no other follows.

        Returns a note if it was the last one to record.
        """
        self._steps += 1
        return self.finish() if is_last or iteration + 1 >= self._end else None

    def finish(self) -> str | None:
        """Write what was recorded; returns a note, or None if nothing was recorded."""
        profiler, self._profiler, self._is_on = self._profiler, None, False
        if profiler is None:
            return None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        path = self._folder / f"iter_{self._iteration:07d}_rank{self._rank}"
        try:
            profiler.stop()
            summary = summarize(profiler.events() or [], seconds, self._steps)
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(f"{path}.json.gz")
            Path(f"{path}.txt").write_text("\n".join([summary, *_tables(profiler)]) + "\n")
        except (OSError, RuntimeError) as error:  # a run does not need its profile
            warning = f"warning: the profile was not written to {path}.*: {error}"
            if self._rank != 0:  # whose notes are not printed
                print(f"rank {self._rank}: {warning}", file=sys.stderr, flush=True)
            return warning
        return f"{summary}; see {self._folder}"


def summarize(events: Iterable[Any], seconds: float, steps: int) -> str:
    """One line: what the device and the host did in the `seconds` of `steps` steps.

    Args:
        events: of torch's profiler; their times are in microseconds.
        seconds: with what lies between the steps.
    """
    kernels, launches, waits, waited = [], 0, 0, 0.0
    for event in events:
        begin, end = event.time_range.start, event.time_range.end
        if event.device_type == DeviceType.CUDA:
            if not event.is_user_annotation:  # a range of the program, with gaps between kernels
                kernels.append((begin, end))
        elif event.name.startswith(_LAUNCHES):
            launches += 1
        elif event.name in _WAITS:
            waits += 1
            waited += (end - begin) / 1e6
    line = f"profile of {counted(steps, 'step')}: {seconds / steps * 1e3:,.1f} ms a step"
    if not kernels:
        return line
    busy = covered(kernels) / 1e6
    return (
        f"{line}; the device works {busy / steps * 1e3:,.1f} ms of them ({busy / seconds:.0%}); "
        f"kernels and copies a step: {launches / steps:,.0f}; the host waits "
        f"{waited / steps * 1e3:,.1f} ms in {waits / steps:,.0f} calls"
    )


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals, given as (begin, end)."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _tables(profiler: torch.profiler.profile) -> Iterable[str]:
    averages = profiler.key_averages()
    keys = ["self_cpu_time_total"]
    if torch.cuda.is_available():
        keys.insert(0, "self_cuda_time_total")
    for key in keys:
        yield f"\nby {key}:"
        yield averages.table(sort_by=key, row_limit=_ROWS, max_name_column_width=90)
