"""routing_map, permute and unpermute.

permute and unpermute without gates are each other's gradients, so these two can be differentiated
any number of times; unpermute with gates once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_parallel.ops.reference import accumulation_dtype
from moe_parallel.ops.types import RowMap

_ops = torch.ops.moe_parallel


def routing_map(
    experts_TK: Tensor,
    num_experts: int,
    rows_per_expert: int | None = None,
    all_chosen: bool = False,
) -> RowMap:
    return RowMap(*_ops.routing_map(experts_TK, num_experts, rows_per_expert, all_chosen))


def permute(x_TD: Tensor, row_map: RowMap) -> Tensor:
    return _ops.permute(x_TD, row_map.slots_N, row_map.rows_TK)


def unpermute(y_ND: Tensor, row_map: RowMap, gates_TK: Tensor | None = None) -> Tensor:
    if gates_TK is not None:
        gates_TK = gates_TK.to(accumulation_dtype(y_ND.dtype))
    return _ops.unpermute(y_ND, row_map.slots_N, row_map.rows_TK, gates_TK)


@torch.library.register_fake("moe_parallel::routing_map")
def _(
    experts: Tensor, num_experts: int, rows_per_expert: int | None, all_chosen: bool
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows: int | torch.SymInt
    if rows_per_expert is not None:
        num_rows = num_experts * rows_per_expert
    elif all_chosen:
        num_rows = experts.numel()
    else:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    return (
        experts.new_empty(num_rows),
        experts.new_empty(experts.shape),
        experts.new_empty(num_experts),
    )


@torch.library.register_fake("moe_parallel::permute")
def _(x: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty(slots.size(0), x.size(1))


@torch.library.register_fake("moe_parallel::unpermute")
def _(y: Tensor, slots: Tensor, rows: Tensor, gates: Tensor | None) -> Tensor:
    return y.new_empty(rows.size(0), y.size(1))


@torch.library.register_fake("moe_parallel::unpermute_backward")
def _(dout: Tensor, y: Tensor, slots: Tensor, rows: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), gates.new_empty(gates.shape)


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


torch.library.register_autograd(
    "moe_parallel::permute", _permute_backward, setup_context=_save_permute
)
torch.library.register_autograd(
    "moe_parallel::unpermute", _unpermute_backward, setup_context=_save_unpermute
)
