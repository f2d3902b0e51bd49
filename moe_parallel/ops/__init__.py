"""The operators of a mixture of experts, behind one face.

    ops = select_backend("auto")
    row_map = ops.routing_map(experts_TK, num_experts)
    x_ND = ops.permute(x_TD, row_map)
    y_NO = ops.grouped_gemm(x_ND, w_EDO, row_map.counts_E)
    y_TO = ops.unpermute(y_NO, row_map, gates_TK)

`reference.py` is the specification: shapes, types and gradients are documented there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_parallel.errors import InputError
from moe_parallel.ops import extension, reference
from moe_parallel.ops.row_map import RowMap

__all__ = ["BACKENDS", "Ops", "RowMap", "select_backend"]

BACKENDS = ("reference", "native", "auto")


class RoutingMap(Protocol):
    def __call__(
        self, experts_TK: Tensor, num_experts: int, rows_per_expert: int | None = None
    ) -> RowMap: ...


class Unpermute(Protocol):
    def __call__(self, y_ND: Tensor, row_map: RowMap, gates_TK: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Ops:
    """One backend's operators; `reference.py` says what each does."""

    name: str
    routing_map: RoutingMap
    permute: Callable[[Tensor, RowMap], Tensor]
    unpermute: Unpermute
    grouped_gemm: Callable[[Tensor, Tensor, Tensor], Tensor]
    norm_topk: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def select_backend(name: str) -> Ops:
    """The operators called `name`: reference, native (the C++ extension) or auto.

    auto is native where the extension is built, except for one without CUDA kernels on a
    machine with a GPU. Raises InputError for another name, and for native without extension.
    """
    if name not in BACKENDS:
        raise InputError(f"--moe-backend {name!r} is unknown: choose one of {', '.join(BACKENDS)}")
    if name == "native" or (name == "auto" and _native_serves_this_machine()):
        import moe_parallel.ops.native as native  # registers operators, so only when asked for

        return Ops(
            name="native",
            routing_map=native.routing_map,
            permute=native.permute,
            unpermute=native.unpermute,
            grouped_gemm=native.grouped_gemm,
            norm_topk=native.norm_topk,
        )
    return Ops(
        name="reference",
        routing_map=reference.routing_map,
        permute=reference.permute,
        unpermute=reference.unpermute,
        grouped_gemm=reference.grouped_gemm,
        norm_topk=reference.norm_topk,
    )


def _native_serves_this_machine() -> bool:
    return extension.is_built() and (extension.has_cuda() or not torch.cuda.is_available())
