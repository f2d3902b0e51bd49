"""The operators in C++ (csrc/): same contracts as reference.py, on CPU and, where built, CUDA.

Importing this module registers `torch.ops.moe_parallel.*` with their shapes (fake kernels, for
tracing) and gradients. Each C++ operator takes and returns plain tensors; the functions here put
RowMap and optional arguments around them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_parallel.ops import extension
from moe_parallel.ops.reference import accumulation_dtype
from moe_parallel.ops.row_map import RowMap

extension.load()
_ops = torch.ops.moe_parallel


def routing_map(experts_TK: Tensor, num_experts: int, rows_per_expert: int | None = None) -> RowMap:
    return RowMap(*_ops.routing_map(experts_TK, num_experts, rows_per_expert))


def permute(x_TD: Tensor, row_map: RowMap) -> Tensor:
    return _ops.permute(x_TD, row_map.slots_N, row_map.rows_TK)


def unpermute(y_ND: Tensor, row_map: RowMap, gates_TK: Tensor | None = None) -> Tensor:
    if gates_TK is not None:
        gates_TK = gates_TK.to(accumulation_dtype(y_ND.dtype))
    return _ops.unpermute(y_ND, row_map.slots_N, row_map.rows_TK, gates_TK)


def grouped_gemm(x_NI: Tensor, w_EIO: Tensor, counts_E: Tensor) -> Tensor:
    return _ops.grouped_gemm(x_NI, w_EIO, counts_E)


def norm_topk(x_TD: Tensor, w_EDR: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return _ops.norm_topk(x_TD, w_EDR, k)


# Shapes.


@torch.library.register_fake("moe_parallel::routing_map")
def _(
    experts: Tensor, num_experts: int, rows_per_expert: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows: int | torch.SymInt
    if rows_per_expert is None:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    else:
        num_rows = num_experts * rows_per_expert
    counts = experts.new_empty(num_experts, device="cpu")
    return experts.new_empty(num_rows), experts.new_empty(experts.shape), counts


@torch.library.register_fake("moe_parallel::permute")
def _(x: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty(slots.size(0), x.size(1))


@torch.library.register_fake("moe_parallel::unpermute")
def _(y: Tensor, slots: Tensor, rows: Tensor, gates: Tensor | None) -> Tensor:
    return y.new_empty(rows.size(0), y.size(1))


@torch.library.register_fake("moe_parallel::unpermute_backward")
def _(dout: Tensor, y: Tensor, slots: Tensor, rows: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), gates.new_empty(gates.shape)


@torch.library.register_fake("moe_parallel::grouped_gemm")
def _(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.size(0), w.size(2))


@torch.library.register_fake("moe_parallel::grouped_outer")
def _(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.size(0), x.size(1), y.size(1))


@torch.library.register_fake("moe_parallel::norm_topk")
def _(x: Tensor, w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    norms = x.new_empty(x.size(0), w.size(0), dtype=accumulation_dtype(x.dtype))
    return norms, x.new_empty(x.size(0), k, dtype=torch.int64)


@torch.library.register_fake("moe_parallel::norm_topk_backward")
def _(dnorms: Tensor, x: Tensor, w: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)


# Gradients. permute and unpermute without gates are each other's, and so are grouped_gemm and
# grouped_outer, so these four can be differentiated any number of times; the others once.


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, slots, rows = inputs
    ctx.save_for_backward(slots, rows)


def _permute_backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
    return _ops.unpermute(dout, *ctx.saved_tensors, None), None, None


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, slots, rows, gates = inputs
    ctx.gated = gates is not None
    ctx.save_for_backward(*((y, slots, rows, gates) if ctx.gated else (slots, rows)))


def _unpermute_backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
    if not ctx.gated:
        return _ops.permute(dout, *ctx.saved_tensors), None, None, None
    dy, dgates = _gated_unpermute_backward(ctx, dout)
    return dy, None, None, dgates


@once_differentiable
def _gated_unpermute_backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    return _ops.unpermute_backward(dout, *ctx.saved_tensors)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_gemm_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w, counts = ctx.saved_tensors
    dx = _ops.grouped_gemm(dy, w.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
    dw = _ops.grouped_outer(x, dy, counts) if ctx.needs_input_grad[1] else None
    return dx, dw, None


def _grouped_outer_backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, y, counts = ctx.saved_tensors
    dx = _ops.grouped_gemm(y, dw.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
    dy = _ops.grouped_gemm(x, dw, counts) if ctx.needs_input_grad[1] else None
    return dx, dy, None


def _save_norm_topk(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, _ = inputs
    norms, experts = output
    ctx.mark_non_differentiable(experts)
    ctx.save_for_backward(x, w, norms)


@once_differentiable
def _norm_topk_backward(ctx: Any, dnorms: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    dx, dw = _ops.norm_topk_backward(dnorms, *ctx.saved_tensors)
    return dx, dw, None


for _name, _save, _backward in (
    ("permute", _save_permute, _permute_backward),
    ("unpermute", _save_unpermute, _unpermute_backward),
    ("grouped_gemm", _save_inputs, _grouped_gemm_backward),
    ("grouped_outer", _save_inputs, _grouped_outer_backward),
    ("norm_topk", _save_norm_topk, _norm_topk_backward),
):
    torch.library.register_autograd(f"moe_parallel::{_name}", _backward, setup_context=_save)
