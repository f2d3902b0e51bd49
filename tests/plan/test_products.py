"""How the sizes of a product lower its speed: by hand, and as kernels were measured."""

import pytest

from moe_parallel.plan.products import DEPTH, Product, serial_share

SMS = 132  # of an H100


def test_by_hand_without_depth() -> None:
    def share(m: int, n: int, k: int = 64, matrices: int = 1, processors: int = 4) -> float:
        return Product(m, n, k, matrices).share(processors, depth=0)

    assert share(512, 256) == 1  # four tiles of 128 x 256 or of 256 x 128
    assert share(640, 256) == 5 / 6  # ten tiles of 128 x 128 in three waves of four
    assert share(512, 256, matrices=3) == 1
    assert share(192, 128, matrices=4) == 0.75  # tiles at the edges are computed whole
    assert share(256, 128) == 1  # two tiles of 128 x 128, each on two processors
    assert share(1024, 16) == 1  # narrow tiles
    assert share(1, 1) == 1 / (16 * 128)  # on one processor of four, which divide the sum


def test_the_depth_by_hand() -> None:
    assert Product(512, 256, 480).share(4, depth=160) == 480 / (480 + 160)
    # On two processors each, so half as deep.
    assert Product(256, 128, 640).share(4, depth=160) == 320 / (320 + 160)


def test_products_one_after_the_other() -> None:
    whole, half = Product(512, 256, 160), Product(512, 256, 160 * 3)
    assert serial_share((whole,), 4, 160) == 0.5
    # 1 and 3 parts of the FLOPs at 1/2 and 3/4 of the speed: 2 and 4 parts of the time.
    assert serial_share((whole, half), 4, 160) == pytest.approx(4 / 6)
    assert serial_share((), 4, 160) == 1


#: m, n, k, matrices, and TFLOP/s in FP8 on H800, of DeepGEMM's pull requests 168 and 74. DEPTH
#: comes from the first four, the tile of 128 x 192 from n = 2112. The last two were not used.
MEASURED = [
    (4096, 24576, 1536, 1, 1263),
    (4096, 32768, 512, 1, 938),
    (4096, 7168, 16384, 1, 1484),
    (4096, 4096, 7168, 1, 1424),
    (4096, 2112, 7168, 1, 1296),
    (8192, 4096, 7168, 4, 1381),
    (8192, 7168, 2048, 4, 1262),
]


@pytest.mark.parametrize(("m", "n", "k", "matrices", "measured"), MEASURED)
def test_as_measured(m: int, n: int, k: int, matrices: int, measured: int) -> None:
    planned = 1513 * Product(m, n, k, matrices).share(SMS, 2 * DEPTH)
    assert planned == pytest.approx(measured, rel=0.04)
