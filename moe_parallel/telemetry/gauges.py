"""Instruments of the machine: what psutil reads of the host, and NVML of a GPU.

A gauge is read now and then by a background thread. Each reading is a dict from the names in
QUANTITIES to numbers; what a machine does not support is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]

from moe_parallel.optional import import_optional


class Over(Enum):
    """How the numbers of all ranks become one."""

    MEAN = "mean"
    SUM = "sum"
    LEAST = "least"
    MOST = "most"


#: The reasons why a GPU lowers its clocks, by bit: `nvmlClocksEventReason...` in nvml.h.
SLOWDOWNS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}

#: What is read, and how the values of ranks combine.
QUANTITIES: dict[str, Over] = {
    "process_cpu_percent": Over.MEAN,  # of one core: 200 is two cores
    "process_memory_bytes": Over.MOST,  # resident
    "host_cpu_percent": Over.MEAN,  # of all cores
    "host_memory_percent": Over.MOST,  # in use
    "host_load": Over.MOST,  # runnable processes, mean of a minute
    "gpu_percent": Over.MEAN,  # share of the time in which a kernel ran
    "gpu_memory_bytes": Over.MOST,  # in use, of all processes
    "gpu_clock_mhz": Over.LEAST,  # of the multiprocessors
    "gpu_memory_clock_mhz": Over.LEAST,
    "gpu_celsius": Over.MOST,
    "gpu_watts": Over.SUM,
    **{f"gpu_slowed_{reason}": Over.MOST for reason in SLOWDOWNS.values()},  # share of readings
}

#: A counter of joules, which becomes watts; not a quantity by itself.
ENERGY = "gpu_joules"

Reading = dict[str, float]


class Gauge(Protocol):
    """Reads some quantities. Only one thread calls it."""

    def read(self) -> Reading: ...


class HostGauge:
    """This process and its host, by psutil."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.read()  # shares of the CPU are counted from one call to the next

    def read(self) -> Reading:
        return {
            "process_cpu_percent": self._process.cpu_percent(),
            "process_memory_bytes": self._process.memory_info().rss,
            "host_cpu_percent": psutil.cpu_percent(),
            "host_memory_percent": psutil.virtual_memory().percent,
            "host_load": psutil.getloadavg()[0],
        }


class GpuGauge:
    """One GPU, by NVML. It is found by its UUID: CUDA_VISIBLE_DEVICES renumbers GPUs for torch."""

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

        def add(name: str, query: Callable[..., Any], *words: int, unit: float = 1) -> None:
            with contextlib.suppress(nvml.NVMLError):  # not supported by this GPU
                reading[name] = query(gpu, *words) * unit

        with contextlib.suppress(nvml.NVMLError):
            reading["gpu_percent"] = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
        with contextlib.suppress(nvml.NVMLError):
            reading["gpu_memory_bytes"] = nvml.nvmlDeviceGetMemoryInfo(gpu).used
        add("gpu_clock_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        add("gpu_memory_clock_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM)
        add("gpu_celsius", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        add("gpu_watts", nvml.nvmlDeviceGetPowerUsage, unit=1e-3)  # milliwatts
        add(ENERGY, nvml.nvmlDeviceGetTotalEnergyConsumption, unit=1e-3)  # millijoules
        with contextlib.suppress(nvml.NVMLError):
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
            for bit, reason in SLOWDOWNS.items():
                reading[f"gpu_slowed_{reason}"] = float(bool(reasons & bit))
        return reading
