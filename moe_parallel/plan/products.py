"""How the sizes of a matrix product lower the speed of its kernel.

A kernel cuts the output [m, n] into tiles, and each multiprocessor of a GPU computes a tile at a
time. Three things make it slower than a large product (NVIDIA, Matrix Multiplication Background
User's Guide, DU-09799, chapters 2 and 3):

    tile quantization     the tiles at the edges are computed whole
    wave quantization     in the last wave some multiprocessors have no tile
    depth                 a tile begins with loads and ends with stores, which take as long as
                          DEPTH more numbers of the sum over k

A fourth, small factors whose loads from memory take longer than the products, is `Work.nbytes`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

#: Tiles of the kernels of cuBLAS, CUTLASS and DeepGEMM. Narrow ones are for narrow products only:
#: they load more for each product.
TILES = ((256, 128), (128, 256), (128, 192), (128, 160), (128, 128))
NARROW = (64, 32, 16)
#: With fewer tiles than multiprocessors, so many of them divide the sum over k of a tile.
SPLITS = (1, 2, 4, 8, 16)
#: In bf16. Derived, not from the runs that check a plan: DeepGEMM on H800 (its pull request 168)
#: reaches 938, 1263, 1424 and 1484 TFLOP/s with m = 4096 and k = 512, 1536, 7168 and 16384 in FP8,
#: within 2% of 1513 k / (k + 320). A number of the sum takes twice as long in bf16.
DEPTH = 160


@dataclass(frozen=True)
class Product:
    """`matrices` products of [m, k] and [k, n] in one kernel; m, n and k of each."""

    m: float
    n: float
    k: float
    matrices: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.matrices

    def share(self, processors: int, depth: float = DEPTH) -> float:
        """Its speed, as a share of that of a large product, with the best tiles.

        Args:
            processors: the multiprocessors of the GPU.
            depth: DEPTH, or twice as much in FP8.
        """
        return _share(self, processors, depth)


@functools.lru_cache(maxsize=2**16)  # a search asks for few products, each very often
def _share(product: Product, processors: int, depth: float) -> float:
    tiles = [*TILES]
    tiles += [(128, width) for width in NARROW if product.n <= width]
    tiles += [(width, 128) for width in NARROW if product.m <= width]
    return max(_share_with(product, *tile, processors, depth) for tile in tiles)


def _share_with(product: Product, rows: int, columns: int, processors: int, depth: float) -> float:
    m, n, k, matrices = product.m, product.n, product.k, product.matrices
    tiles = matrices * math.ceil(m / rows) * math.ceil(n / columns)
    splits = [split for split in SPLITS if split == 1 or tiles * split <= processors]
    computed = min(math.ceil(tiles * split / processors) * (k / split + depth) for split in splits)
    return m * n * k * matrices / (computed * processors * rows * columns)


def serial_share(products: tuple[Product, ...], processors: int, depth: float) -> float:
    """The share of products that run one after the other; 1 if there are none."""
    whole = sum(each.flops for each in products)
    if not whole:
        return 1.0
    return whole / sum(each.flops / each.share(processors, depth) for each in products)
