"""Grouped products whose sizes only the device reads: the product for the cases that tensor cores
do not accept, and the arguments of each group for the products on tensor cores."""

import ctypes
from ctypes import c_bool, c_int, c_int64, c_void_p

import numpy as np
import pytest

from tests.cuda_host.emulation import structure
from tests.oracles import ops as oracle

pytestmark = pytest.mark.full

FLOAT32 = 0  # ScalarType in csrc/scalar_type.h
RAGGED = -1

GroupOffsets = structure(counts=c_void_p, offsets=c_void_p, groups=c_int64, rows=c_int64)
GroupedMatrix = structure(
    data=c_void_p, stride=c_int64, group_stride=c_int64, by_columns=c_bool, is_cut=c_bool
)
GroupedProduct = structure(
    type=c_int,
    out_type=c_int,
    a=GroupedMatrix,
    b=GroupedMatrix,
    d=GroupedMatrix,
    offsets=c_void_p,
    groups=c_int64,
    rows=c_int64,
    m=c_int64,
    n=c_int64,
    k=c_int64,
    accumulate=c_bool,
)

COUNTS = [[3, 5, 2], [0, 70, 0, 1, 0], [0, 0], [130], [n % 4 for n in range(40)]]


def offsets_of(kernels, counts: list[int], rows: int) -> np.ndarray:
    given = np.array(counts, dtype=np.int64)
    offsets = np.full(len(counts) + 1, -7, dtype=np.int64)
    task = GroupOffsets(given.ctypes.data, offsets.ctypes.data, len(counts), rows)
    kernels.group_offsets(ctypes.byref(task))
    return offsets


def rows_of(x: np.ndarray, transposed: bool = False) -> ctypes.Structure:
    return GroupedMatrix(x.ctypes.data, x.shape[1], 0, transposed, True)


def matrices(w: np.ndarray, by_columns: bool = False) -> ctypes.Structure:
    return GroupedMatrix(w.ctypes.data, w.shape[2], w[0].size, by_columns, False)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_offsets(kernels, counts):
    assert offsets_of(kernels, counts, sum(counts)).tolist() == [0, *np.cumsum(counts)]


def test_counts_that_do_not_fit_are_cut_off(kernels):
    assert offsets_of(kernels, [3, -2, 5, 9, 2**62], 10).tolist() == [0, 3, 3, 8, 10, 10]


def product(kernels, a, b, d, counts: list[int], rows: int, sizes: tuple[int, ...], **more):
    """The task; its offsets live as long as the task."""
    offsets = offsets_of(kernels, counts, rows)
    task = GroupedProduct(
        a=a,
        b=b,
        d=d,
        offsets=offsets.ctypes.data,
        groups=len(counts),
        rows=rows,
        **dict(zip("mnk", sizes, strict=True)),
        **more,
    )
    task.keep = offsets
    return task


def over_groups(kernels, counts: list[int], inner: int, outer: int, by_columns: bool,
                accumulate: bool):  # fmt: skip
    """d[rows of e] (+)= x[rows of e] w[e]: the task, d, the expected result, and live tensors."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(sum(counts), inner)), rng.normal(size=(len(counts), inner, outer))
    d = rng.normal(size=(sum(counts), outer)).astype(np.float32)
    wanted = oracle.grouped_gemm(x, w, counts) + (d if accumulate else 0)
    laid_out = w.transpose(0, 2, 1) if by_columns else w
    single = x.astype(np.float32), np.ascontiguousarray(laid_out, dtype=np.float32)
    task = product(
        kernels,
        *(rows_of(single[0]), matrices(single[1], by_columns), rows_of(d), counts, len(x)),
        (RAGGED, outer, inner),
        type=FLOAT32,
        out_type=FLOAT32,
        accumulate=accumulate,
    )
    return task, d, wanted, single


def over_rows(kernels, counts: list[int], inner: int, outer: int, accumulate: bool):
    """d[e] (+)= x[rows of e]^T y[rows of e]: the task, d, the expected result, and live tensors."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(counts), inner)), rng.normal(size=(sum(counts), outer))
    d = rng.normal(size=(len(counts), inner, outer)).astype(np.float32)
    groups = np.split(np.arange(len(x)), np.cumsum(counts)[:-1])
    wanted = np.stack([x[rows].T @ y[rows] for rows in groups]) + (d if accumulate else 0)
    single = x.astype(np.float32), y.astype(np.float32)
    task = product(
        kernels,
        *(rows_of(single[0], transposed=True), rows_of(single[1]), matrices(d), counts, len(x)),
        (inner, outer, RAGGED),
        type=FLOAT32,
        out_type=FLOAT32,
        accumulate=accumulate,
    )
    return task, d, wanted, single


def multiply_as_told(kernels, task: ctypes.Structure, accumulate: bool) -> None:
    """The work of CUTLASS: float32 products of the sizes, pointers and strides in the arguments."""
    groups = task.groups
    kernels.group_arguments_bytes.restype = c_int64
    memory = np.zeros(kernels.group_arguments_bytes(c_int64(groups)) // 8, dtype=np.int64)
    kernels.group_arguments(ctypes.byref(task), c_void_p(memory.ctypes.data))
    # Each array has 16 bytes per group for the problems, 8 for the others; the arrays are adjacent.
    problems = memory[: 2 * groups].view(np.int32)[: 3 * groups].reshape(groups, 3)
    pointers, strides = memory[2 * groups :].reshape(2, 3, groups)

    def matrix(i: int, e: int, rows: int, columns: int, by_columns: bool) -> np.ndarray:
        across, along = 4 * int(strides[i, e]), 4
        last = (rows - 1) * across + columns * along
        if by_columns:
            across, along = along, across
            last = (columns - 1) * along + rows * across
        raw = (ctypes.c_char * last).from_address(int(pointers[i, e]))
        return np.ndarray((rows, columns), np.float32, raw, strides=(across, along))

    for e, (m, n, k) in enumerate(problems.tolist()):
        if 0 in (m, n, k):
            continue
        a, b = matrix(0, e, m, k, task.a.by_columns), matrix(1, e, k, n, task.b.by_columns)
        d = matrix(2, e, m, n, False)
        d[:] = a @ b + (d if accumulate else 0)


def run_kernel(kernels, task: ctypes.Structure, accumulate: bool) -> None:
    kernels.grouped_product(ctypes.byref(task))


@pytest.mark.parametrize("multiply", [run_kernel, multiply_as_told])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("by_columns", [False, True, None])  # None: products over rows
@pytest.mark.parametrize("inner, outer", [(1, 1), (7, 5), (20, 67)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_equals_the_product(kernels, counts, inner, outer, by_columns, accumulate, multiply):
    if by_columns is None:
        task, d, wanted, _live = over_rows(kernels, counts, inner, outer, accumulate)
    else:
        task, d, wanted, _live = over_groups(kernels, counts, inner, outer, by_columns, accumulate)
    multiply(kernels, task, accumulate)
    np.testing.assert_allclose(d, wanted, rtol=1e-4, atol=1e-4)
