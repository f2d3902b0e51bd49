"""Whether a run on a CPU keeps the memory that its tensors have freed."""

import sys
from pathlib import Path

import pytest

from tests.program import Program

SCRIPT = Path(__file__).with_name("report_freed_memory.py")


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "kept"),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, "returned"),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, "returned"),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=4"}, "kept"),
    ],
    ids=str,
)
def test_freed_memory_stays_with_a_run_unless_the_environment_says_otherwise(
    tmp_path: Path, environment: dict[str, str], told: str
) -> None:
    with Program(tmp_path, 1, [], environment, script=SCRIPT) as job:
        assert job.finish(120) == 0, job.output
        assert f"freed memory is {told}" in job.output
