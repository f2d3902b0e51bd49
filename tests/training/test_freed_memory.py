"""A run on a CPU keeps the memory that its tensors have freed, unless the environment says how."""

import os
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from moe_parallel.training.pretrain import main
from tests.program import Ranks

MIB = 1 << 20


def _report(*_: object, **__: object) -> int:
    """In place of a run."""
    tensor = torch.ones(48 * MIB // 4)
    held = psutil.Process().memory_info().rss
    del tensor
    returned = held - psutil.Process().memory_info().rss > 24 * MIB
    print("freed memory is", "returned" if returned else "kept", flush=True)
    return 0


def _main_that_reports(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with mock.patch("moe_parallel.training.pretrain.pretrain", _report):
        main([])


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "kept"),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=4:glibc.malloc.mmap_max=0"}, "returned"),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, "returned"),
    ],
    ids=str,
)
def test_freed_memory_stays_with_a_run_unless_the_environment_says_otherwise(
    tmp_path: Path, environment: dict[str, str], told: str
) -> None:
    with Ranks(tmp_path, 1, _main_that_reports, environment) as ranks:
        assert ranks.finish(120) == [0]
        assert f"freed memory is {told}\n" in ranks.output
