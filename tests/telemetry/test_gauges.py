"""Readings of a host and of a GPU; the GPU's driver is a stand-in with the names of NVML."""

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moe_parallel.errors import InputError
from moe_parallel.telemetry.gauges import ENERGY, QUANTITIES, GpuGauge, HostGauge

UUID = "GPU-00000000-1111-2222-3333-444444444444"


class NVMLError(Exception):
    """As pynvml's, the base of all its errors."""


def _not_supported(*_: Any) -> Any:
    raise NVMLError("Not Supported")


def _by_clock(_: Any, clock: int) -> int:
    return {1: 1755, 2: 2619}[clock]  # NVML_CLOCK_SM and NVML_CLOCK_MEM, in MHz


def _handle(uuid: str) -> str:
    if uuid != UUID:
        raise NVMLError("Not Found")
    return "handle"


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda: None,
    "nvmlDeviceGetHandleByUUID": _handle,
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=93, memory=41),
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=80, free=10, used=70),  # bytes
    "nvmlDeviceGetClockInfo": _by_clock,
    "nvmlDeviceGetTemperature": lambda gpu, sensor: {0: 61}[sensor],  # NVML_TEMPERATURE_GPU
    "nvmlDeviceGetPowerUsage": lambda gpu: 698_500,  # mW
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 123_456_789,  # mJ
    # The bits of nvmlClocksEventReasonSwPowerCap and ...HwThermalSlowdown, and ...GpuIdle, which
    # slows nothing.
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 0x4 | 0x40 | 0x1,
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("pynvml")
    constants = {"NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_TEMPERATURE_GPU": 0}
    vars(module).update(FUNCTIONS | constants | {"NVMLError": NVMLError})
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_units_of_a_gpu(nvml: ModuleType) -> None:
    reading = GpuGauge(UUID).read()
    assert reading == pytest.approx(
        {
            "gpu_percent": 93,
            "gpu_memory_bytes": 70,
            "gpu_clock_mhz": 1755,
            "gpu_memory_clock_mhz": 2619,
            "gpu_celsius": 61,
            "gpu_watts": 698.5,
            ENERGY: 123_456.789,
            "gpu_slowed_sw_power_cap": 1,
            "gpu_slowed_hw_slowdown": 0,
            "gpu_slowed_sw_thermal": 0,
            "gpu_slowed_hw_thermal": 1,
            "gpu_slowed_hw_power_brake": 0,
        }
    )
    assert set(reading) - {ENERGY} <= set(QUANTITIES)


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        ("nvmlDeviceGetTotalEnergyConsumption", {ENERGY}),  # before Volta
        ("nvmlDeviceGetUtilizationRates", {"gpu_percent"}),  # with MIG
        ("nvmlDeviceGetMemoryInfo", {"gpu_memory_bytes"}),
        ("nvmlDeviceGetClockInfo", {"gpu_clock_mhz", "gpu_memory_clock_mhz"}),
        (
            "nvmlDeviceGetCurrentClocksEventReasons",
            {name for name in QUANTITIES if name.startswith("gpu_slowed_")},
        ),
    ],
)
def test_what_a_gpu_does_not_support_is_missing(
    nvml: ModuleType, function: str, missing: set[str]
) -> None:
    everything = set(GpuGauge(UUID).read())
    setattr(nvml, function, _not_supported)
    assert set(GpuGauge(UUID).read()) == everything - missing


def test_a_gpu_that_nvml_does_not_know(nvml: ModuleType) -> None:
    with pytest.raises(OSError, match="Not Found"):
        GpuGauge("GPU-other")


def test_without_nvidia_ml_py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    with pytest.raises(InputError, match="needs pynvml, .* not installed: pip install nvidia-ml-p"):
        GpuGauge(UUID)


def test_a_host() -> None:
    gauge = HostGauge()
    sum(i * i for i in range(2_000_000))  # so that the process has used its CPU
    reading = gauge.read()
    assert set(reading) == {name for name in QUANTITIES if not name.startswith("gpu_")}
    assert reading["process_cpu_percent"] > 0
    assert reading["process_memory_bytes"] > 10 * 2**20
    for name in ("host_cpu_percent", "host_memory_percent"):
        assert 0 <= reading[name] <= 100
    assert reading["host_load"] == pytest.approx(os.getloadavg()[0], abs=1)
