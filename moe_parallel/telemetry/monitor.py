"""A background thread that reads the gauges of a rank, so that no step waits for them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from moe_parallel.telemetry.gauges import ENERGY, QUANTITIES, Gauge, Over, Reading


class Monitor:
    """Reads gauges every few seconds while it is open, and averages the readings on request."""

    def __init__(self, gauges: Sequence[Gauge], seconds: float) -> None:
        """`seconds`: between two readings. Without gauges there is no thread."""
        self._gauges = gauges
        self._seconds = seconds
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._sums: Reading = {}
        self._counts: dict[str, int] = {}
        # The counter of energy in joules with its time, at the first and at the latest reading.
        self._energy: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._watch, name="machine-monitor", daemon=True)

    def __enter__(self) -> Monitor:
        if self._gauges:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        if self._gauges and kind is None:  # a failed run leaves at once
            self._thread.join()

    def read(self) -> None:
        """Read all gauges once."""
        readings = [gauge.read() for gauge in self._gauges]
        with self._lock:
            for name, value in (item for reading in readings for item in reading.items()):
                if name == ENERGY:
                    self._energy = [*self._energy[:1], (time.monotonic(), value)]
                else:
                    self._sums[name] = self._sums.get(name, 0.0) + value
                    self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> Reading:
        """The mean of each quantity over the readings since the last call; {} without a reading.

        Where there is a counter of energy, gpu_watts is its change over the time between.
        """
        with self._lock:
            means = {name: total / self._counts[name] for name, total in self._sums.items()}
            self._sums, self._counts = {}, {}
            energy, self._energy = self._energy, self._energy[-1:]
        if len(energy) == 2:
            (begin, before), (end, after) = energy
            means["gpu_watts"] = (after - before) / (end - begin)
        return means

    def _watch(self) -> None:
        while not self._closing.wait(self._seconds):
            self.read()


def over_ranks(means: Reading, device: torch.device) -> Reading:
    """The means of all ranks, combined as QUANTITIES says. Collective.

    What no rank has is missing, and so is a sum to which a rank adds nothing: in a short interval
    a few may have no reading. Two small reductions, at a log line only.
    """
    present = [float(name in means) for name in QUANTITIES]
    values = [means.get(name, 0.0) for name in QUANTITIES]
    most = [means.get(name, -math.inf) for name in QUANTITIES]
    minus_least = [-means.get(name, math.inf) for name in QUANTITIES]
    sums = torch.tensor([values, present], dtype=torch.float64, device=device)
    extremes = torch.tensor([most, minus_least], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    combined: Reading = {}
    rows = zip(QUANTITIES.items(), *sums.tolist(), *extremes.tolist(), strict=True)
    for (name, over), total, count, greatest, minus_smallest in rows:
        if count == dist.get_world_size() or (count and over is not Over.SUM):
            combined[name] = {
                Over.SUM: total,
                Over.MEAN: total / count,
                Over.MOST: greatest,
                Over.LEAST: -minus_smallest,
            }[over]
    return combined
