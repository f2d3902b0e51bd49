"""The rules by which a grouped product gets its tile, compiled for the CPU."""

import ctypes
from itertools import product

import pytest

from tests.cuda_host.test_grouped_gemm import FLOAT32, RAGGED, GroupedMatrix, GroupedProduct

pytestmark = pytest.mark.full

BFLOAT16 = 2  # ScalarType in csrc/scalar_type.h
NONE, SQUARE, WIDE, NARROW = -1, 0, 1, 2
WHERE_FASTER, ALL_SQUARE, ALL_WIDE, ALL_NARROW = range(4)  # Tiling
SIZES = (8, 64, 128, 256, 264, 512, 2048, 28672)


def tile(kernels, sizes, tiling, *, a=False, b=False, out=BFLOAT16, groups=8, rows=16384) -> int:
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
    return kernels.hopper_tile(ctypes.byref(task), tiling)


def test_layouts_without_a_kernel(kernels):
    sizes = (512, 512, RAGGED)
    assert tile(kernels, sizes, WHERE_FASTER, a=True, b=True) == NONE
    assert tile(kernels, (RAGGED, 512, 512), WHERE_FASTER, out=FLOAT32) == NONE
    assert tile(kernels, sizes, WHERE_FASTER, a=True, out=FLOAT32) != NONE


def test_the_square_tile_of_every_product(kernels):
    for n, k, groups, b in product(SIZES, SIZES, (0, 1, 64), (False, True)):
        assert tile(kernels, (RAGGED, n, k), ALL_SQUARE, b=b, groups=groups) == SQUARE
    for m, n, out in product(SIZES, SIZES, (BFLOAT16, FLOAT32)):
        assert tile(kernels, (m, n, RAGGED), ALL_SQUARE, a=True, out=out) == SQUARE


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
        assert tile(kernels, (RAGGED, n, k), WHERE_FASTER, b=b) == wanted


@pytest.mark.parametrize(("m", "n", "short", "in_float"), MEASURED_OUTER)
def test_the_fastest_tile_of_a_measured_outer_product(kernels, m, n, short, in_float):
    assert tile(kernels, (m, n, RAGGED), WHERE_FASTER, a=True) == short
    assert tile(kernels, (m, n, RAGGED), WHERE_FASTER, a=True, out=FLOAT32) == in_float


def test_no_rule_gives_a_wide_tile_to_a_narrower_result(kernels):
    for n, k, b in product(SIZES, SIZES, (False, True)):
        assert n >= 256 or tile(kernels, (RAGGED, n, k), WHERE_FASTER, b=b) != WIDE
    for m, n, out in product(SIZES, SIZES, (BFLOAT16, FLOAT32)):
        assert n >= 256 or tile(kernels, (m, n, RAGGED), WHERE_FASTER, a=True, out=out) != WIDE


@pytest.mark.parametrize("n", SIZES)
def test_a_wide_tile_is_never_wider_than_the_result(kernels, n):
    wanted = WIDE if n >= 256 else SQUARE
    assert tile(kernels, (RAGGED, n, 64), ALL_WIDE) == wanted
    assert tile(kernels, (64, n, RAGGED), ALL_WIDE, a=True) == wanted


def test_narrow_tiles_are_for_the_low_rank(kernels):
    """As the columns of a product or of an outer product, or as the rows of an outer product."""
    for n in SIZES:
        wanted = NARROW if n <= 256 else SQUARE
        assert tile(kernels, (RAGGED, n, 64), ALL_NARROW, b=True) == wanted
        assert tile(kernels, (2048, n, RAGGED), ALL_NARROW, a=True, out=FLOAT32) == wanted
        assert tile(kernels, (n, 2048, RAGGED), ALL_NARROW, a=True) == wanted
