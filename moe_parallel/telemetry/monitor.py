"""What NVML reads of a GPU: its use, memory and power, and why it lowers its clocks.

A background thread reads the gauge of a rank, so that no step waits for it. Each reading is a dict
from the names in QUANTITIES to numbers; what a GPU does not support is missing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

from moe_parallel.collective_errors import exchange
from moe_parallel.optional import import_optional

#: The reasons why a GPU lowers its clocks, by bit: `nvmlClocksEventReason...` in nvml.h.
SLOWDOWNS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}

#: What is read, and how the values of ranks combine.
QUANTITIES: dict[str, Callable[[list[float]], float]] = {
    "gpu_percent": fmean,  # share of the time in which a kernel ran
    "gpu_memory_bytes": max,  # in use, of all processes
    "gpu_watts": sum,
    **{f"gpu_slowed_{reason}": max for reason in SLOWDOWNS.values()},  # share of readings
}

#: A counter of joules, which becomes watts; not a quantity by itself.
ENERGY = "gpu_joules"

Reading = dict[str, float]


class GpuGauge:
    """One GPU. It is found by its UUID: CUDA_VISIBLE_DEVICES renumbers GPUs for torch."""

    def __init__(self, uuid: str) -> None:
        """`uuid`: such as GPU-12345678-...

        Raises:
            InputError: nvidia-ml-py is not installed.
            OSError: NVML does not work here, or does not know this GPU.
        """
        self._nvml = nvml = import_optional("pynvml", "--machine-sample-seconds on a GPU")
        try:
            nvml.nvmlInit()
            self._gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            raise OSError(str(error)) from error

    def read(self) -> Reading:
        nvml, gpu, reading = self._nvml, self._gpu, Reading()
        queries: dict[str, Callable[[], Any]] = {
            "gpu_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "gpu_watts": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,  # milliwatts
            ENERGY: lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,  # millijoules
        }
        for name, query in queries.items():
            with contextlib.suppress(nvml.NVMLError):  # not supported by this GPU
                reading[name] = query()
        with contextlib.suppress(nvml.NVMLError):
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
            for bit, reason in SLOWDOWNS.items():
                reading[f"gpu_slowed_{reason}"] = float(bool(reasons & bit))
        return reading


class Monitor:
    """Reads a gauge every few seconds while it is open, and averages the readings on request."""

    def __init__(self, gauge: GpuGauge | None, seconds: float) -> None:
        """`seconds`: between two readings. Without a gauge there is no thread."""
        self._gauge = gauge
        self._seconds = seconds
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._readings: dict[str, list[float]] = {}
        # The counter of energy in joules with its time, at the first and at the latest reading.
        self._energy: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._watch, name="machine-monitor", daemon=True)

    def __enter__(self) -> Monitor:
        if self._gauge is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._closing.set()
        if self._gauge is not None and kind is None:  # a failed run leaves at once
            self._thread.join()

    def read(self) -> None:
        """Read the gauge once."""
        assert self._gauge is not None
        reading = self._gauge.read()
        with self._lock:
            if ENERGY in reading:
                self._energy = [*self._energy[:1], (time.monotonic(), reading.pop(ENERGY))]
            for name, value in reading.items():
                self._readings.setdefault(name, []).append(value)

    def take(self) -> Reading:
        """The mean of each quantity over the readings since the last call; {} without a reading.

        Where there is a counter of energy, gpu_watts is its change over the time between.
        """
        with self._lock:
            means = {name: fmean(values) for name, values in self._readings.items()}
            self._readings = {}
            energy, self._energy = self._energy, self._energy[-1:]
        if len(energy) == 2:
            (begin, before), (end, after) = energy
            means["gpu_watts"] = (after - before) / (end - begin)
        return means

    def _watch(self) -> None:
        while not self._closing.wait(self._seconds):
            self.read()


def over_ranks(means: Reading) -> Reading:
    """The means of all ranks, combined as QUANTITIES says. Collective.

    What no rank has is missing, and so is a sum to which a rank adds nothing: in a short interval
    a few may have no reading.
    """
    ranks, combined = exchange(means), Reading()
    for name, combine in QUANTITIES.items():
        values = [each[name] for each in ranks if name in each]
        if values and (combine is not sum or len(values) == len(ranks)):
            combined[name] = float(combine(values))
    return combined
