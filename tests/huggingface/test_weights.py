"""The files of an exported model: how tensors are divided, and the memory that this takes."""

import ctypes
import math
import os
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.huggingface.exporting import export_run, save_runs, source_of
from tests.systems import options

MIB = 2**20


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def _export_and_measure(run: Path, output: Path, fold: bool) -> tuple[int, int, int]:
    """The most memory of an export beyond what was used before; the largest tensor; all tensors."""
    source = source_of(run)
    # By default glibc keeps what is freed, up to twice the largest tensor that was freed so far.
    mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 16)
    export_run(run.parent / "small", output.parent / "small_out")  # imports what it needs
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is now what is in use
    before = _status("VmRSS")
    written = export_run(run, output, file_bytes=8 * MIB, fold=fold).written
    most = _status("VmHWM") - before
    config = source.config
    width = 48 * -(-config.expert_width // 48)
    largest = math.prod((config.num_experts, 2, width, config.model.hidden_size)) * 4
    return most, largest, written.size


@pytest.mark.full
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize("fold", [False, True])
def test_memory_is_below_two_tensors_and_a_file(fold: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 192, "num_layers": 5}
    experts = {"moe_ffn_hidden_size": 1920}
    if fold:
        experts = options("aoe") | {"aoe_low_rank_size": 16, "aoe_wide_size": 1920}
    runs = [(tmp_path / "run", sizes | experts), (tmp_path / "small", {})]
    run_distributed(1, save_runs, runs)
    ((most, largest, size),) = run_distributed(
        1, _export_and_measure, tmp_path / "run", tmp_path / "out", fold
    )
    assert size > 6 * largest
    assert most < 2 * largest + 8 * MIB
