"""The CPU kernels with each set of vector instructions for which they are compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CAPABILITIES = ["portable", "avx2", "avx512", "avx512_bf16"]
FILES = ["operators", "rows", "special_values", "attention", "norm_topk"]
SHOW = "from moe_parallel.ops import extension; print(extension.load().build_info())"


def run(*arguments: str, capability: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment | {"MOE_PARALLEL_CPU": capability},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(params=CAPABILITIES)
def capability(request: pytest.FixtureRequest) -> str:
    shown = run("-c", SHOW, capability=request.param)
    if "this processor has" in shown.stderr and request.param != "portable":
        pytest.skip(shown.stderr.splitlines()[-1])
    assert f"'cpu_capability': '{request.param}'" in shown.stdout, shown.stderr
    return request.param


@pytest.mark.full
def test_operators_equal_their_oracles(capability):
    files = [f"tests/ops/test_{name}.py" for name in FILES]
    options = ["-q", "--full", "-p", "no:cacheprovider", "-k", "native and cpu and not refused"]
    done = run("-m", "pytest", *options, *files, capability=capability)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout.splitlines()[-1]


@pytest.mark.full
def test_the_best_is_chosen_by_default_and_an_unknown_name_is_an_input_error():
    chosen = run("-c", SHOW, capability="").stdout
    refused = run("-c", SHOW, capability="avx1024").stderr.splitlines()[-1]
    assert "InputError: MOE_PARALLEL_CPU is 'avx1024': this processor has " in refused
    assert refused.endswith("portable")
    best = refused.partition("this processor has ")[2].partition(",")[0]
    assert f"'cpu_capability': '{best}'" in chosen
