"""The operators of a mixture of experts, behind one interface.

    ops = select_backend("auto")
    row_map = ops.routing_map(experts_TK, num_experts)
    y_TD = ops.routed_experts(x_TD, probs_TK, row_map, w_gate_up_ED2F, w_out_EFD)

which is the same as

    x_ND = ops.permute(x_TD, row_map)
    gate_NF, up_NF = ops.grouped_gemm(x_ND, w_gate_up_ED2F, row_map.counts_E).chunk(2, dim=1)
    h_NF = ops.swiglu(gate_NF, up_NF, probs_N)
    y_TD = ops.unpermute(ops.grouped_gemm(h_NF, w_out_EFD, row_map.counts_E), row_map)

`reference.py` is the specification. It documents shapes, dtypes and gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moe_parallel.errors import InputError
from moe_parallel.ops import extension, reference
from moe_parallel.ops.types import Choose, Gradient, Keep, NormScores, RowMap

__all__ = ["BACKENDS", "Ops", "RowMap", "NormScores", "select_backend"]

BACKENDS = ("reference", "native", "auto")


class RoutingMap(Protocol):
    def __call__(
        self,
        experts_TK: Tensor,
        num_experts: int,
        pad_rows_per_expert: int | None = None,
        all_chosen: bool = False,
    ) -> RowMap: ...


class Unpermute(Protocol):
    def __call__(self, y_ND: Tensor, row_map: RowMap, probs_TK: Tensor | None = None) -> Tensor: ...


class Swiglu(Protocol):
    def __call__(self, gate_NF: Tensor, up_NF: Tensor, probs_N: Tensor | None = None) -> Tensor: ...


class Multiply(Protocol):
    def __call__(
        self,
        a_NI: Tensor,
        b_IO: Tensor,
        out_NO: Tensor | None = None,
        *,
        accumulate: bool = False,
    ) -> Tensor: ...


class NormTopK(Protocol):
    def __call__(
        self,
        x_TD: Tensor,
        w_EDR: Tensor,
        k: int | None,
        bias_E: Tensor | None = None,
        *,
        keep: Keep = "nothing",
        gradient: Gradient = "all",
        chosen: Choose | None = None,
        screening: int = 0,
    ) -> NormScores: ...


class RoutedExperts(Protocol):
    def __call__(
        self,
        x_TD: Tensor,
        probs_TK: Tensor,
        row_map: RowMap,
        w_gate_up_ED2F: Tensor,
        w_out_EFD: Tensor,
        *,
        main_gradients: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor: ...


class AutonomousExperts(Protocol):
    def __call__(
        self,
        x_TD: Tensor,
        probs_TK: Tensor,
        row_map: RowMap,
        w_down_EDR: Tensor,
        w_up_ERW: Tensor,
        w_p_EDW: Tensor,
        w_out_EWD: Tensor,
        *,
        c_TKR: Tensor | None = None,
        norms_TK: Tensor | None = None,
        recompute_gate: bool = True,
        main_gradients: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Ops:
    """The operators of one backend; `reference.py` specifies each of them."""

    name: str
    routing_map: RoutingMap
    permute: Callable[[Tensor, RowMap], Tensor]
    unpermute: Unpermute
    grouped_gemm: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu: Swiglu
    swiglu_halves: Callable[[Tensor], Tensor]
    product: Multiply
    norm_topk: NormTopK
    expert_merge: Callable[[Tensor, Tensor], Tensor]
    routed_experts: RoutedExperts
    autonomous_experts: AutonomousExperts


def select_backend(name: str) -> Ops:
    """The operators of the backend `name`: reference, native (the C++ extension) or auto.

    auto is native if the extension is built, unless the extension has no CUDA kernels and the
    machine has a GPU; then auto is reference. Raises InputError for another name, and for native
    if the extension is not built.
    """
    if name not in BACKENDS:
        raise InputError(f"--moe-backend {name!r} is unknown: choose one of {', '.join(BACKENDS)}")
    if name == "native" or (name == "auto" and _native_serves_this_machine()):
        import moe_parallel.ops.native as native  # registers operators, so only when asked for

        return _operators_of("native", native)
    return _operators_of("reference", reference)


def _operators_of(name: str, module: ModuleType) -> Ops:
    operators = [field.name for field in fields(Ops) if field.name != "name"]
    return Ops(name, **{operator: getattr(module, operator) for operator in operators})


def _native_serves_this_machine() -> bool:
    return extension.is_built() and (extension.has_cuda() or not torch.cuda.is_available())
