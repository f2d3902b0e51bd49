"""The CUDA kernels run on the CPU. Their indices, sums, collectives and row ends are the source
that nvcc compiles; only the threads differ (include/cuda_runtime_api.h)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_parallel.ops import extension

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
FILES = "operators", "rows", "special_values", "packed_rows", "norm_topk", "rotary"
# Cases that CUDA drops silently but the CPU rejects, and tests that run no kernel of ours.
LEFT_OUT = "refused or reference or threads"


def test_the_operators_tests_pass_on_the_kernels(library):
    files = [f"tests/ops/test_{name}.py" for name in FILES]
    said = run(library, *files, "-k", f"not ({LEFT_OUT})")
    tasks = re.search(r"csrc/cuda: (\d+)$", said, re.MULTILINE)
    assert tasks and int(tasks[1]) > 100
    products = re.search(r"squares: (\d+)$", said, re.MULTILINE)
    assert products and int(products[1]) > 10


def test_norms_pass_on_the_kernels_inside_the_layer(library):
    said = run(library, "tests/ops/test_expert_rows.py", "-k", "composition and plain and norms")
    tasks = re.search(r"csrc/cuda: (\d+)$", said, re.MULTILINE)
    assert tasks and int(tasks[1]) > 20


def run(library: Path, *arguments: str) -> str:
    """The output of pytest with these arguments; the extension's CPU tensors use the kernels."""
    if not extension.is_built():
        pytest.skip("the C++ extension is not built: make set-up")
    emulation = [sys.executable, "-m", "tests.cuda_host.emulation", library, "-q"]
    selection = ["--full", "-m", "not gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*emulation, *arguments, *selection], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout
