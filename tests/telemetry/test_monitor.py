"""Readings in the background, their averages, and one number of all ranks."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from moe_parallel.telemetry import monitor as monitor_module
from moe_parallel.telemetry.gauges import ENERGY, Reading
from moe_parallel.telemetry.monitor import Monitor, over_ranks
from tests.distributed import run_distributed


class Listed:
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


def test_means_since_the_last_call() -> None:
    gauge = Listed({"host_load": 1, "gpu_percent": 50}, {"host_load": 4}, {"host_load": 7})
    monitor = Monitor([gauge, Listed({"gpu_celsius": 60})], seconds=1000)
    assert monitor.take() == {}
    monitor.read()
    monitor.read()
    assert monitor.take() == {"host_load": 2.5, "gpu_percent": 50, "gpu_celsius": 60}
    assert monitor.take() == {}
    monitor.read()
    assert monitor.take() == {"host_load": 7}


def test_power_is_the_change_of_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter misses nothing between two readings, as samples of power do."""
    now = [100.0, 102.0, 110.0, 115.0]
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(monotonic=lambda: now.pop(0)))
    joules = (5000.0, 5100.0, 9000.0, 10_000.0)
    monitor = Monitor([Listed(*({ENERGY: j, "gpu_watts": 1.0} for j in joules))], seconds=1000)
    monitor.read()
    assert monitor.take() == {"gpu_watts": 1.0}  # one reading of the counter says nothing
    monitor.read()
    monitor.read()
    assert monitor.take() == {"gpu_watts": 400.0}  # 4,000 J in 10 s
    assert monitor.take() == {}
    monitor.read()
    assert monitor.take() == {"gpu_watts": 200.0}


def test_only_its_own_thread_reads_until_it_is_closed() -> None:
    gauge = Listed({"host_load": 1}, {"host_load": 2})
    with Monitor([gauge], seconds=0.001) as monitor:
        assert gauge.is_empty.wait(60)
    assert monitor.take()["host_load"] == 1.5
    (thread,) = set(gauge.threads)
    assert thread is not threading.current_thread() and not thread.is_alive()


def test_without_gauges_there_is_no_thread() -> None:
    before = threading.active_count()
    with Monitor([], seconds=0.001) as monitor:
        assert threading.active_count() == before
    assert monitor.take() == {}


MEANS: list[Reading] = [
    {"host_cpu_percent": 10, "host_load": 3, "gpu_clock_mhz": 1900, "gpu_watts": 600},
    {"host_cpu_percent": 20, "host_load": 8, "gpu_clock_mhz": 1200, "gpu_watts": 700}
    | {"gpu_celsius": 71},
]


def _combined() -> tuple[Reading, Reading]:
    rank, cpu = dist.get_rank(), torch.device("cpu")
    return over_ranks(MEANS[rank], cpu), over_ranks(MEANS[0] if rank == 0 else {}, cpu)


def test_over_ranks() -> None:
    """A mean, the most, the least, a sum; and what only one rank has."""
    expected = {"host_cpu_percent": 15, "host_load": 8, "gpu_clock_mhz": 1200, "gpu_watts": 1300}
    expected["gpu_celsius"] = 71
    of_one = {"host_cpu_percent": 10, "host_load": 3, "gpu_clock_mhz": 1900}  # no sum of all
    assert run_distributed(2, _combined) == [(expected, of_one)] * 2
