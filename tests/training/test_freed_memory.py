"""Whether a run on a CPU keeps the memory that its tensors have freed."""

import os
import sys
from pathlib import Path

import pytest

from moe_parallel.platform import device as freed_memory
from tests.program import Program

SCRIPT = Path(__file__).with_name("report_freed_memory.py")


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "kept"),
        pytest.param(
            {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
            "returned",
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_freed_memory_stays_with_a_run_unless_the_environment_says_otherwise(
    tmp_path: Path, environment: dict[str, str], told: str
) -> None:
    with Program(tmp_path, 1, [], environment, script=SCRIPT) as job:
        assert job.finish(120) == 0, job.output
        assert f"freed memory is {told}" in job.output


@pytest.mark.parametrize(
    ("environment", "keeps"),
    [
        ({}, True),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=4"}, True),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=4:glibc.malloc.mmap_max=0"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, False),
        ({"MALLOC_MMAP_MAX_": "65536"}, False),
    ],
    ids=str,
)
def test_settings_of_the_environment_stay(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], keeps: bool
) -> None:
    for name in [name for name in os.environ if name.startswith(("GLIBC_", "MALLOC_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    kept: list[bool] = []
    monkeypatch.setattr(freed_memory, "keep_freed_memory", lambda: kept.append(True))
    freed_memory.keep_freed_memory_unless_set()
    assert kept == [True] * keeps
