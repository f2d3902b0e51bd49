"""Our layer once more, with products of a CPU that are not the default: packed, or not packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops import extension
from tools.bench.contender import BenchContender, Values

PACKED, NOT_PACKED = "ours, packed products", "ours, products not packed"


def with_other_products(contender: BenchContender, dtype: torch.dtype) -> list[BenchContender]:
    """`contender` with the other products, or nothing where this device can pack none."""
    (leaf, *_) = contender.leaves.values()
    module = extension.load()
    in_bf16 = dtype == torch.bfloat16
    with _products(module.CpuProducts.PACKED):
        can_pack = module.packs_products(in_bf16)
    if leaf.is_cuda or not can_pack:
        return []
    packs = module.packs_products(in_bf16)
    products = module.CpuProducts.ONEDNN if packs else module.CpuProducts.PACKED

    def forward() -> Sequence[Tensor]:
        with _products(products):
            return contender.forward()

    own = {field.name: getattr(contender, field.name) for field in fields(contender)}
    own |= {"name": NOT_PACKED if packs else PACKED, "forward": forward, "products": products}
    return [_WithProducts(**own)]


@dataclass(frozen=True)
class _WithProducts(BenchContender):
    products: Any = None

    def backward(self, outputs: Sequence[Tensor]) -> Values:
        with _products(self.products):
            return super().backward(outputs)


@contextmanager
def _products(wanted: Any) -> Iterator[None]:
    module = extension.load()
    before = module.set_cpu_products(wanted)
    try:
        yield
    finally:
        module.set_cpu_products(before)
