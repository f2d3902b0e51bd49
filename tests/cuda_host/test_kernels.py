"""The memory-bound CUDA kernels, run on the CPU: their indices, sums, collectives and ends of rows
are the source that nvcc compiles; only the threads are others (include/cuda_runtime_api.h)."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_parallel.ops import extension
from tests.cuda_host import emulation
from tests.oracles import ops as oracle

ROOT = Path(__file__).parents[2]
OPS = ("permute", "unpermute", "routing_map")
# What CUDA leaves out silently is an error on the CPU; and these have no kernels of ours.
LEFT_OUT = "refused or reference or threads"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    if emulation.compiler() is None:
        pytest.skip("no C++ compiler to build the kernels with (CXX, c++)")
    return emulation.build(tmp_path_factory.mktemp("cuda_host"))


def test_the_operators_tests_pass_on_the_kernels(library):
    if not extension.is_built():
        pytest.skip("the C++ extension is not built: pip install -e .")
    files = [f"tests/ops/test_{op}.py" for op in OPS]
    selection = ["-k", f"not ({LEFT_OUT})", "-m", "not gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_host.emulation", library, "-q", *files, *selection],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    tasks = re.search(r"csrc/cuda: (\d+)$", done.stdout, re.MULTILINE)
    assert tasks and int(tasks[1]) > 100


class CountChoices(ctypes.Structure):
    _fields_ = [
        ("experts", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("choices", "num_experts", "chunks", "chunk_size")),
    ]


class PlaceChoices(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("experts", "first_row", "slots", "rows")),
        *((name, ctypes.c_int64) for name in ("choices", "num_experts", "num_rows")),
        *((name, ctypes.c_int64) for name in ("rows_per_expert", "chunks", "chunk_size")),
    ]


@pytest.mark.parametrize(
    "choices, num_experts, chunk_size",
    [(1, 1, 512), (512, 7, 512), (513, 7, 512), (3001, 64, 512), (2000, 1500, 333), (40, 3, 1)],
)
def test_a_sort_in_chunks(library, choices, num_experts, chunk_size):
    kernels = emulation.load(library)
    chunks = -(-choices // chunk_size)
    experts = np.random.default_rng(0).integers(-1, num_experts, choices)
    counts = np.full((num_experts + 1, chunks), -7, dtype=np.int64)
    kernels.count_choices(
        ctypes.byref(
            CountChoices(
                experts.ctypes.data, counts.ctypes.data, choices, num_experts, chunks, chunk_size
            )
        )
    )
    chunk_of = np.arange(choices) // chunk_size
    wanted = np.zeros_like(counts)
    np.add.at(wanted, (np.where(experts < 0, num_experts, experts), chunk_of), 1)
    np.testing.assert_array_equal(counts, wanted)

    first_row = np.cumsum(wanted[:-1].reshape(-1)) - wanted[:-1].reshape(-1)
    num_rows = int(wanted[:-1].sum())
    slots, rows = np.full(num_rows, -1), np.full(choices, -1)
    kernels.place_choices(
        ctypes.byref(
            PlaceChoices(
                *(array.ctypes.data for array in (experts, first_row, slots, rows)),
                *(choices, num_experts, num_rows, -1, chunks, chunk_size),
            )
        )
    )
    wanted_slots, wanted_rows, _ = oracle.routing_map(experts[:, None], num_experts, None)
    np.testing.assert_array_equal(slots, wanted_slots)
    np.testing.assert_array_equal(rows, wanted_rows[:, 0])


def test_what_overflows_a_capacity_is_not_placed(library):
    kernels = emulation.load(library)
    experts, first_row = np.array([1, 0, 1, 1, 0]), np.array([0, 2])
    slots, rows = np.full(4, -1), np.full(5, -1)
    kernels.place_choices(
        ctypes.byref(
            PlaceChoices(
                *(array.ctypes.data for array in (experts, first_row, slots, rows)),
                *(5, 2, 4, 2, 1, 512),
            )
        )
    )
    assert slots.tolist() == [1, 4, 0, 2]
    assert rows.tolist() == [2, 0, 3, -1, 1]
