"""What a run measures besides its losses: the machine, the times of all ranks, and profiles."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from moe_parallel.collective_errors import exchange
from moe_parallel.config import Config
from moe_parallel.config.message import counted
from moe_parallel.errors import InputError
from moe_parallel.model.flops import token_flops
from moe_parallel.platform.device import device
from moe_parallel.telemetry.monitor import GpuGauge, Monitor, over_ranks
from moe_parallel.telemetry.progress import Progress
from moe_parallel.telemetry.stragglers import Member, News, RankTimes, summary

#: Dense bf16 TFLOP/s of NVIDIA's data sheets, by the beginning of the name; the longest counts.
BF16_TFLOPS = {
    "NVIDIA A100": 312.0,
    "NVIDIA A800": 312.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA GH200": 989.0,
    "NVIDIA B200": 2250.0,
}


class Instruments:
    """The gauge of this rank's GPU, and the formulas of its speed. Make it by `open_instruments`.

    Attributes:
        warnings: that this rank lacks its gauge, and why.
    """

    def __init__(self, config: Config, vocab_size: int) -> None:
        """`vocab_size`: of the tokenizer."""
        self.warnings: list[str] = []
        self._padded_vocab_size = config.padded_vocab_size(vocab_size)
        self._peak = config.logging.peak_tflops or peak_tflops(config.training.bf16)
        seconds = config.logging.machine_sample_seconds
        self._samples = seconds is not None
        self.monitor = Monitor(self._gauge() if self._samples else None, seconds or 1.0)

    def record(
        self, config: Config, tokens_per_second: float, layers: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        """The `machine` of a record, over the time since the last call. Collective.

        Args:
            config: of the model that was trained in this time.
            tokens_per_second: of all ranks.
            layers: the statistics of its layers; see `RoutingTotals.summaries`.
        """
        flops = token_flops(config, self._padded_vocab_size, computed_choices(layers))
        rate = flops.training * tokens_per_second / dist.get_world_size() / 1e12
        record = {"tflops_per_device": rate}
        if self._peak is not None:
            record["mfu"] = rate / self._peak
        if self._samples:
            record |= over_ranks(self.monitor.take())
        if "gpu_watts" in record:
            record["joules_per_token"] = record["gpu_watts"] / tokens_per_second
        return record

    def _gauge(self) -> GpuGauge | None:
        if not torch.cuda.is_available():
            return None
        try:
            return GpuGauge(f"GPU-{torch.cuda.get_device_properties(device()).uuid}")
        except (InputError, OSError) as error:  # a run does not need its telemetry
            self.warnings.append(f"the GPU is not monitored: {error}")
            return None


@contextlib.contextmanager
def open_instruments(config: Config, vocab_size: int) -> Iterator[Instruments]:
    """Instruments that read in the background inside this context."""
    instruments = Instruments(config, vocab_size)
    with instruments.monitor:
        yield instruments


def computed_choices(layers: Sequence[Mapping[str, Any]]) -> float:
    """The mean number of experts that computed a token, without dropped choices; 0: no layers."""
    if not layers:
        return 0.0
    kept = [
        layer["experts_per_token"]
        * (1 - layer["tokens_dropped"] / max(1, sum(layer["tokens_per_expert"])))
        for layer in layers
    ]
    return float(sum(kept) / len(kept))


def peak_tflops(bf16: bool) -> float | None:
    """The most TFLOP/s of this process's device; None if not known, as on a CPU or in fp32."""
    if not (bf16 and torch.cuda.is_available()):
        return None
    name = torch.cuda.get_device_name()
    known = [each for each in BF16_TFLOPS if name.startswith(each)]
    return BF16_TFLOPS[max(known, key=len)] if known else None


class GatheredTimes:
    """The times of all ranks over the steps of a log line, with one collective a line."""

    def __init__(self, progress: Progress, stage: int) -> None:
        """`stage`: of this rank in the pipeline. Collective."""
        self._progress = progress
        self._members = exchange(Member(socket.gethostname(), stage))
        self._news = News()

    def take(self) -> tuple[dict[str, Any], str | None]:
        """`summary` of the steps since the last call, and a line about a straggler if one is due.

        Collective. The result is the same on every rank, except the line.
        """
        steps, rows = self._progress.take()
        found = summary(exchange(RankTimes.of(steps, rows)), self._members)
        return found, self._news.of(found["slowest"], len(steps), time.monotonic())


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
