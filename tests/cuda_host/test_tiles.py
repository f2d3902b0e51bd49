"""The rules by which a grouped product gets its tile, compiled for the CPU."""

import ctypes

import pytest

from tests.cuda_host.test_grouped_gemm import FLOAT32, RAGGED, GroupedMatrix, GroupedProduct

pytestmark = pytest.mark.full

BFLOAT16 = 2  # ScalarType in csrc/scalar_type.h
NONE = -1


def tile(kernels, sizes, *, a=False, b=False, out=BFLOAT16, groups=8, rows=16384) -> int:
    """`a` and `b`: whether the operand is column-major."""
    task = GroupedProduct(
        type=BFLOAT16,
        out_type=out,
        a=GroupedMatrix(by_columns=a),
        b=GroupedMatrix(by_columns=b),
        groups=groups,
        rows=rows,
        **dict(zip("mnk", sizes, strict=True)),
    )
    return kernels.hopper_tile(ctypes.byref(task))


def test_layouts_without_a_kernel(kernels):
    sizes = (512, 512, RAGGED)
    assert tile(kernels, sizes, a=True, b=True) == NONE
    assert tile(kernels, (RAGGED, 512, 512), out=FLOAT32) == NONE
    assert tile(kernels, sizes, a=True, out=FLOAT32) != NONE
