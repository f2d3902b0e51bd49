"""The error of setup.py if it cannot build: one line with the missing part and the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build(**environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_stops_with(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 1
    ours = [line for line in done.stderr.splitlines() if line.startswith("moe_parallel:")]
    assert len(ours) == 1 and all(word in ours[0] for word in words), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_no_compiler():
    assert_stops_with(build(CXX="no-such-compiler"), "'no-such-compiler'", "apt install g++", "CXX")


@pytest.mark.full
def test_unknown_build():
    assert_stops_with(build(MOE_PARALLEL_BUILD="gpu"), "'gpu'", "auto, cpu or cuda")


@pytest.mark.full
def test_cuda_that_is_not_there(tmp_path):
    """Either torch is a CPU build or, with this CUDA_HOME, there is no compiler."""
    done = build(MOE_PARALLEL_BUILD="cuda", CUDA_HOME=str(tmp_path))
    assert_stops_with(done, "MOE_PARALLEL_BUILD=cuda, but ")


@pytest.mark.full
def test_cutlass_that_is_not_there(tmp_path):
    done = build(CUTLASS_PATH=str(tmp_path))
    assert_stops_with(done, f"CUTLASS_PATH is {tmp_path}", "include/cutlass/cutlass.h")


def test_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('gone', name='torch')\n")
    done = build(PYTHONPATH=str(tmp_path))
    assert_stops_with(
        done, "torch is needed", "tools/constraints.txt torch", "--no-build-isolation"
    )
