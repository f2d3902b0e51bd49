"""kernels.cpp compares the CPU kernels with plain loops where Python cannot reach them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["tests/csrc/kernels.cpp", "csrc/cpu/capability.cpp"]
CAPABILITIES = ["portable", "avx2", "avx512", "avx512_bf16"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def run(*command: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.full  # compilation takes half a minute
def test_under_the_address_and_undefined_behavior_sanitizers(tmp_path):
    kernels = [f"csrc/cpu/{name}.cpp" for name in CAPABILITIES]
    program = tmp_path / "kernels"
    compiler = os.environ.get("CXX", "c++").split()
    built = run(*compiler, "-std=c++20", "-O1", *SANITIZERS, *SOURCES, *kernels, "-o", program)
    if "cannot find" in built.stderr:
        pytest.skip(f"the sanitizers' libraries are not installed: {built.stderr.splitlines()[0]}")
    assert built.returncode == 0, built.stderr
    for capability in CAPABILITIES:
        done = run(program, MOE_PARALLEL_CPU=capability)
        if "this processor has" in done.stderr and capability != "portable":
            continue
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == f"{capability} kernels: 0 failures\n"


@pytest.mark.full
def test_on_aarch64():
    done = run("tools/check_aarch64.sh", sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    if "portable kernels: 0 failures" not in done.stdout:
        pytest.skip(done.stdout.splitlines()[-1])
