"""The most that the machine can do, measured in turn with the contenders.

A copy moves as many bytes as the work must (half read, half written). Dense products do as many
FLOPs as the work, on the same shapes but with one matrix for all rows. Results overwrite earlier
ones, so allocation takes no time.

Products are torch's, except in fp32 on a CPU. There they are those of the library that our
operators call, which on AMD's processors with AVX-512 is oneDNN: it is faster than torch's MKL.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_parallel.ops import select_backend
from tools.bench.contender import Moved, Products


def ceiling_of(work: Moved | Products, dtype: torch.dtype, device: str) -> Callable[[], object]:
    return _copy(work, device) if isinstance(work, Moved) else _products(work, dtype, device)


def _copy(work: Moved, device: str) -> Callable[[], object]:
    source = torch.zeros(max(work.bytes // 8, 1), device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _products(work: Products, dtype: torch.dtype, device: str) -> Callable[[], object]:
    # Not the device's own generator: a capture of a graph that fails leaves that one unusable.
    generator = torch.Generator(device)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, generator=generator).to(dtype)

    # Equal shapes share their matrices. The cache does not hold them anyway.
    operands = {
        (m, k, n): (matrix(m, k), matrix(k, n), matrix(m, n)) for m, k, n in set(work.shapes)
    }

    by_torch = device != "cpu" or dtype != torch.float32
    multiply_into = _by_torch if by_torch else select_backend("native").product

    def multiply() -> None:
        for shape in work.shapes:
            multiply_into(*operands[shape])

    return multiply


def _by_torch(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(left, right, out=out)
