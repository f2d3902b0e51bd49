"""Time the tiles of CUTLASS's grouped products for Hopper, for the products of the goals' layers.

    python tools/bench/tiles.py --json tiles.json      # on an H100 or H200, in about a minute

The products are those of a forward and backward pass of the routed and AoE layers, in bf16. The
tiles of a product take turns, and their results are compared. At the end are the lines for
csrc/cuda/cutlass/tiles.h, for each product that another tile computes at least 3% faster than the
square one. Exit codes: 0 done, whatever was measured; 2 a wrong flag, or no such GPU; 130
interrupted, after the measurements so far have been written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.errors import InputError
from moe_parallel.ops import extension
from moe_parallel.tool import Tool
from tools.bench import benchmark
from tools.bench.about import about
from tools.bench.clock import work_clock_of
from tools.bench.contender import FORWARD, Bench, BenchContender, Forward, Measure, Products
from tools.bench.measurement import Patience, measure
from tools.bench.results import BenchRow, times_as_fast
from tools.bench.sizes import GOALS, BenchSize, sizes_of
from tools.bench.table import DIFFERS, format_row

HOPPER = (9, 0)
TILES = ("SQUARE", "WIDE", "NARROW")  # of _C.Tiling; the first is the default
PRODUCT, BY_TRANSPOSED, OUTER, OUTER_IN_FLOAT = KINDS = (
    "kProduct", "kByTransposed", "kOuter", "kOuterInFloat",
)  # fmt: skip
GAIN = 1.03  # another tile must be so many times as fast
SECONDS_OF_A_ROW = 0.2


@dataclass(frozen=True)
class GroupedSize:
    """A product of `rows` rows in `groups` groups, by matrices of k x n: x w or x w^T. An outer
    product x^T y has k x n results for each group."""

    kind: str
    groups: int
    rows: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"groups={self.groups} rows={self.rows} k={self.k} n={self.n}"

    def rule(self, tile: str) -> str:
        """The line of kFastestTiles. It holds for half to twice as many rows per group."""
        mean = self.rows // self.groups
        rows, k, n = (f"{{{low}, {high}}}" for low, high in
                      ((mean // 2, 2 * mean), (self.k, self.k), (self.n, self.n)))  # fmt: skip
        m_n_k = (k, n, rows) if self.kind in (OUTER, OUTER_IN_FLOAT) else (rows, n, k)
        sizes = ", ".join(m_n_k)
        return f"{{ProductKind::{self.kind}, {sizes}, Tile::k{tile.capitalize()}}},"


def products_of(size: BenchSize, weights: Iterable[tuple[int, int]]) -> list[GroupedSize]:
    """What a forward and backward pass multiplies, for the experts' weights (inner, outer)."""
    found = []
    for inner, outer in weights:
        of_kinds = (inner, outer), (outer, inner), (inner, outer), (inner, outer)
        found += [
            GroupedSize(kind, size.n, size.rows, k, n)
            for kind, (k, n) in zip(KINDS, of_kinds, strict=True)
        ]
    return found


def goal_products() -> list[GroupedSize]:
    sizes = sizes_of(GOALS, "cuda")
    found: list[GroupedSize] = []
    for size in sizes["grouped_gemm"]:
        found += products_of(size, [(size.d, size.f)])
    for size in sizes["routed_layer"]:
        found += products_of(size, [(size.d, 2 * size.f), (size.f, size.d)])
    for size in sizes["aoe_layer"]:
        low = [(size.d, size.l), (size.l, size.wide)]
        found += products_of(size, [*low, (size.d, size.wide), (size.wide, size.d)])
    return list(dict.fromkeys(found))


def bench_of(size: GroupedSize, device: str) -> Bench:
    """The product with each tile. A main gradient grows with every turn, so kOuterInFloat has no
    result to compare."""
    module = extension.load()

    def contender(tile: str, multiply: Forward) -> BenchContender:
        def forward() -> list[Tensor]:
            module.set_tiling(getattr(module.Tiling, tile))
            return list(multiply())

        return BenchContender(tile.lower(), forward)

    multiply = _multiply(size, device)
    square, *others = (contender(tile, multiply) for tile in TILES)
    work = Products(((size.rows, size.k, size.n),))
    measures = (Measure(FORWARD, work),)
    return Bench(size.kind, size, torch.bfloat16, [square], others, measures)


def _multiply(size: GroupedSize, device: str) -> Forward:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    experts = torch.arange(size.rows, device=device) * 7919 % size.groups
    counts = experts.bincount(minlength=size.groups)
    ops, x = torch.ops.moe_parallel, normal(size.rows, size.k)
    if size.kind in (OUTER, OUTER_IN_FLOAT):
        y = normal(size.rows, size.n)
        if size.kind == OUTER:
            return lambda: [ops.grouped_outer(x, y, counts)]
        total = torch.zeros(size.groups, size.k, size.n, device=device)

        def add() -> list[Tensor]:
            ops.grouped_outer_add(total, x, y, counts)
            return []

        return add
    if size.kind == BY_TRANSPOSED:
        w = normal(size.groups, size.n, size.k).transpose(1, 2)
    else:
        w = normal(size.groups, size.k, size.n)
    return lambda: [ops.grouped_gemm(x, w, counts)]


def rules(sizes: Iterable[GroupedSize], rows: Iterable[BenchRow]) -> list[str]:
    """The lines of kFastestTiles. A tile whose result differs, or that failed, has none."""
    lines = []
    for size, row in zip(sizes, rows, strict=False):
        right = [r for r in row.results if r.absent is None and r.differs is None]
        best = min(right, key=lambda result: result.median)
        if best is not row.ours and times_as_fast(best, row.ours) >= GAIN:
            lines.append(size.rule(best.name))
    return lines


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    benchmark.add_flags(tool)
    return tool.run(arguments, lambda own: _time(arguments, own))


def _time(arguments: list[str], options: argparse.Namespace) -> int:
    benchmark.check(options)
    _check_gpu()
    sizes = goal_products()
    facts: dict[str, Any] = about("tiles.py", arguments)
    facts |= {"instructions": torch.cuda.get_device_name(), "threads": torch.get_num_threads()}

    def measure_all(rows: list[BenchRow]) -> None:
        clock, patience = work_clock_of("cuda"), Patience(SECONDS_OF_A_ROW, options.turns)
        for size in sizes:
            rows += measure(bench_of(size, "cuda"), clock, "cuda", patience)
            print(f"\n{format_row(rows[-1])}", flush=True)

    def print_rules(rows: list[BenchRow]) -> None:
        wrong = [row.title for row in rows if any(result.differs for result in row.results)]
        print("\nkFastestTiles:", *(rules(sizes, rows) or ["no other tile is 3% faster"]), sep="\n")
        if wrong:
            print(f"{DIFFERS}:", *wrong, sep="\n")

    return benchmark.run(facts, measure_all, print_rules, options.json)


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise InputError("torch sees no CUDA GPU here: the tiles are those of an H100 or H200")
    if torch.cuda.get_device_capability() != HOPPER:
        raise InputError(f"{torch.cuda.get_device_name()} has no wgmma: use an H100 or H200")
    if not extension.load().build_info()["cutlass"]:
        raise InputError("the extension was built without CUDA or CUTLASS: build it with both")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
