"""Readings of a GPU, whose driver is a stand-in, their means, and one number of all ranks."""

import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import distributed as dist

from moe_parallel.telemetry import monitor as monitor_module
from moe_parallel.telemetry.monitor import (
    ENERGY,
    QUANTITIES,
    GpuGauge,
    Monitor,
    Reading,
    over_ranks,
)
from tests.distributed import run_distributed


class Listed(GpuGauge):
    """A gauge that reads what is on its list, and says in which thread."""

    def __init__(self, *readings: Reading) -> None:
        self.readings = list(readings)
        self.threads: list[threading.Thread] = []
        self.is_empty = threading.Event()

    def read(self) -> Reading:
        self.threads.append(threading.current_thread())
        if len(self.readings) == 1:
            self.is_empty.set()
        return self.readings.pop(0) if self.readings else {}


FULL: Reading = {"gpu_memory_bytes": 60}


def test_means_since_the_last_call() -> None:
    monitor = Monitor(Listed({"gpu_percent": 1, **FULL}, {"gpu_percent": 4}, FULL), seconds=1000)
    assert monitor.take() == {}
    monitor.read()
    monitor.read()
    assert monitor.take() == {"gpu_percent": 2.5, "gpu_memory_bytes": 60}
    assert monitor.take() == {}
    monitor.read()
    assert monitor.take() == FULL


def test_power_is_the_change_of_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter misses nothing between two readings, as samples of power do."""
    now = [100.0, 102.0, 110.0, 115.0]
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(monotonic=lambda: now.pop(0)))
    joules = (5000.0, 5100.0, 9000.0, 10_000.0)
    monitor = Monitor(Listed(*({ENERGY: j, "gpu_watts": 1.0} for j in joules)), seconds=1000)
    monitor.read()
    assert monitor.take() == {"gpu_watts": 1.0}  # one reading of the counter says nothing
    monitor.read()
    monitor.read()
    assert monitor.take() == {"gpu_watts": 400.0}  # 4,000 J in 10 s
    assert monitor.take() == {}
    monitor.read()
    assert monitor.take() == {"gpu_watts": 200.0}


def test_only_its_own_thread_reads_until_it_is_closed() -> None:
    gauge = Listed({"gpu_percent": 1}, {"gpu_percent": 2})
    with Monitor(gauge, seconds=0.001) as monitor:
        assert gauge.is_empty.wait(60)
    assert monitor.take()["gpu_percent"] == 1.5
    (thread,) = set(gauge.threads)
    assert thread is not threading.current_thread() and not thread.is_alive()
    before = threading.active_count()
    with Monitor(None, seconds=0.001) as monitor:
        assert threading.active_count() == before
    assert monitor.take() == {}


MEANS: list[Reading] = [
    {"gpu_percent": 10, "gpu_slowed_hw_slowdown": 0.25, "gpu_watts": 600},
    {"gpu_percent": 20, "gpu_slowed_hw_slowdown": 0.5, "gpu_watts": 700, "gpu_memory_bytes": 71},
]


def _combined() -> tuple[Reading, Reading]:
    rank = dist.get_rank()
    return over_ranks(MEANS[rank]), over_ranks(MEANS[0] if rank == 0 else {})


def test_over_ranks() -> None:
    """A mean, the most, a sum; and what only one rank has."""
    expected = MEANS[1] | {"gpu_percent": 15, "gpu_watts": 1300}
    of_one = {"gpu_percent": 10, "gpu_slowed_hw_slowdown": 0.25}  # no sum of all
    assert run_distributed(2, _combined) == [(expected, of_one)] * 2


UUID = "GPU-00000000-1111-2222-3333-444444444444"


class NVMLError(Exception):
    """As pynvml's, the base of all its errors."""


def _not_supported(*_: Any) -> Any:
    raise NVMLError("Not Supported")


def _handle(uuid: str) -> str:
    if uuid != UUID:
        raise NVMLError("Not Found")
    return "handle"


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda: None,
    "nvmlDeviceGetHandleByUUID": _handle,
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=93, memory=41),
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=80, free=10, used=70),  # bytes
    "nvmlDeviceGetPowerUsage": lambda gpu: 698_500,  # mW
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 123_456_789,  # mJ
    # The bits of nvmlClocksEventReasonSwPowerCap and ...HwThermalSlowdown, and ...GpuIdle, which
    # slows nothing.
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 0x4 | 0x40 | 0x1,
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("pynvml")
    vars(module).update(FUNCTIONS | {"NVMLError": NVMLError})
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_units_of_a_gpu_and_what_it_does_not_support(nvml: ModuleType) -> None:
    reading = GpuGauge(UUID).read()
    slowed = {
        "gpu_slowed_sw_power_cap": 1,
        "gpu_slowed_hw_slowdown": 0,
        "gpu_slowed_sw_thermal": 0,
        "gpu_slowed_hw_thermal": 1,
        "gpu_slowed_hw_power_brake": 0,
    }
    numbers = {"gpu_percent": 93, "gpu_memory_bytes": 70, "gpu_watts": 698.5, ENERGY: 123_456.789}
    assert reading == pytest.approx(numbers | slowed)
    assert set(reading) - {ENERGY} <= set(QUANTITIES)
    for function, missing in {
        "nvmlDeviceGetTotalEnergyConsumption": {ENERGY},  # before Volta
        "nvmlDeviceGetUtilizationRates": {"gpu_percent"},  # with MIG
        "nvmlDeviceGetCurrentClocksEventReasons": set(slowed),
    }.items():
        setattr(nvml, function, _not_supported)
        assert set(GpuGauge(UUID).read()) == set(reading) - missing
        setattr(nvml, function, FUNCTIONS[function])
    with pytest.raises(OSError, match="Not Found"):
        GpuGauge("GPU-other")
