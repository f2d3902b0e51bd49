"""The rules by which a grouped product gets its tile, compiled for the CPU."""

import ctypes

import pytest

from tests.cuda_host.test_grouped_gemm import FLOAT32, RAGGED, GroupedMatrix, GroupedProduct

pytestmark = pytest.mark.full

BFLOAT16 = 2  # ScalarType in csrc/scalar_type.h
NONE, SQUARE, WIDE, NARROW = -1, 0, 1, 2
SIZES = (8, 64, 128, 256, 264, 512, 2048, 28672)


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


# Products of a layer of 8 experts, d=768, and of one of 64 experts, d=2048.
MEASURED_RAGGED = [  # columns, depth
    (6144, 768, SQUARE),
    (768, 3072, WIDE),
    (4416, 64, WIDE),
    (4416, 768, SQUARE),
    (64, 4416, NARROW),
    (128, 4224, SQUARE),
    (1024, 2048, SQUARE),
    (2048, 256, WIDE),
]
MEASURED_OUTER = [  # rows and columns of the result; in bf16, and in fp32
    (768, 64, NARROW, NARROW),
    (128, 4224, NARROW, NARROW),
    (4416, 768, WIDE, SQUARE),
    (768, 4416, SQUARE, SQUARE),
    (2048, 1024, SQUARE, SQUARE),
    (256, 3840, SQUARE, SQUARE),
]


@pytest.mark.parametrize(("n", "k", "wanted"), MEASURED_RAGGED)
def test_the_fastest_tile_of_a_measured_product(kernels, n, k, wanted):
    for b in (False, True):
        assert tile(kernels, (RAGGED, n, k), b=b) == wanted


@pytest.mark.parametrize(("m", "n", "short", "in_float"), MEASURED_OUTER)
def test_the_fastest_tile_of_a_measured_outer_product(kernels, m, n, short, in_float):
    assert tile(kernels, (m, n, RAGGED), a=True) == short
    assert tile(kernels, (m, n, RAGGED), a=True, out=FLOAT32) == in_float
