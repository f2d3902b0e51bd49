"""The product that takes what tensor cores do not; the group sizes are read by the kernel."""

import ctypes
from ctypes import c_bool, c_int, c_int64, c_void_p

import numpy as np
import pytest

from tests.cuda_host.emulation import structure
from tests.oracles import ops as oracle

FLOAT32, FLOAT64 = 0, 1  # ScalarType in csrc/scalar_type.h
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


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("inner, outer", [(1, 1), (7, 5), (20, 67)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_times_matrices(kernels, counts, inner, outer, by_columns, accumulate):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(sum(counts), inner)), rng.normal(size=(len(counts), inner, outer))
    d = rng.normal(size=(sum(counts), outer))
    wanted = oracle.grouped_gemm(x, w, counts) + (d if accumulate else 0)
    laid_out = np.ascontiguousarray(w.transpose(0, 2, 1)) if by_columns else w
    offsets = offsets_of(kernels, counts, len(x))
    task = GroupedProduct(
        type=FLOAT64,
        out_type=FLOAT64,
        a=rows_of(x),
        b=matrices(laid_out, by_columns),
        d=rows_of(d),
        offsets=offsets.ctypes.data,
        groups=len(counts),
        rows=len(x),
        m=RAGGED,
        n=outer,
        k=inner,
        accumulate=accumulate,
    )
    kernels.grouped_product(ctypes.byref(task))
    np.testing.assert_allclose(d, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("inner, outer", [(1, 1), (7, 5), (20, 67)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_products_over_rows(kernels, counts, inner, outer, accumulate):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(counts), inner)), rng.normal(size=(sum(counts), outer))
    d = rng.normal(size=(len(counts), inner, outer)).astype(np.float32)
    groups = np.split(np.arange(len(x)), np.cumsum(counts)[:-1])
    single = x.astype(np.float32), y.astype(np.float32)
    wanted = np.stack([x[rows].T @ y[rows] for rows in groups]) + (d if accumulate else 0)
    offsets = offsets_of(kernels, counts, len(x))
    task = GroupedProduct(
        type=FLOAT32,
        out_type=FLOAT32,
        a=rows_of(single[0], transposed=True),
        b=rows_of(single[1]),
        d=matrices(d),
        offsets=offsets.ctypes.data,
        groups=len(counts),
        rows=len(x),
        m=inner,
        n=outer,
        k=RAGGED,
        accumulate=accumulate,
    )
    kernels.grouped_product(ctypes.byref(task))
    np.testing.assert_allclose(d, wanted, rtol=1e-4, atol=1e-4)
