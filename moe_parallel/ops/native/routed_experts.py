"""The routed layer in one: what lies between its products is neither returned nor kept."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_parallel.ops.reference import accumulation_dtype
from moe_parallel.ops.row_map import RowMap

_ops = torch.ops.moe_parallel


def routed_experts(
    x_TD: Tensor,
    gates_TK: Tensor,
    row_map: RowMap,
    w_gate_up_ED2F: Tensor,
    w_out_EFD: Tensor,
) -> Tensor:
    gates_TK = gates_TK.to(accumulation_dtype(x_TD.dtype))
    y_TD, _ = _ops.routed_experts(x_TD, gates_TK, *row_map, w_gate_up_ED2F, w_out_EFD)
    return y_TD


@torch.library.register_fake("moe_parallel::routed_experts")
def _(
    x: Tensor,
    gates: Tensor,
    slots: Tensor,
    rows: Tensor,
    counts: Tensor,
    w_gate_up: Tensor,
    w_out: Tensor,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(slots.size(0), w_gate_up.size(2))


@torch.library.register_fake("moe_parallel::routed_experts_backward")
def _(
    dy: Tensor,
    x: Tensor,
    gates: Tensor,
    slots: Tensor,
    rows: Tensor,
    counts: Tensor,
    w_gate_up: Tensor,
    w_out: Tensor,
    gate_up: Tensor,
) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (x, gates, w_gate_up, w_out))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    _, gate_up = output
    ctx.mark_non_differentiable(gate_up)
    ctx.set_materialize_grads(False)  # or there would be zeros as large as gate_up
    ctx.save_for_backward(*inputs, gate_up)


@once_differentiable
def _backward(ctx: Any, dy: Tensor | None, dgate_up: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    dx, dgates, dw_gate_up, dw_out = _ops.routed_experts_backward(dy, *ctx.saved_tensors)
    return dx, dgates, None, None, None, dw_gate_up, dw_out


torch.library.register_autograd("moe_parallel::routed_experts", _backward, setup_context=_save)
