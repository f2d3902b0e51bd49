"""The routed layer as one operator, which returns no intermediate result but x [W_g | W_p]."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake
from moe_parallel.ops.native.main_gradients import gradients_not_added, own_gradient
from moe_parallel.ops.native.packed_rows import rows_like
from moe_parallel.ops.once import once_differentiable
from moe_parallel.ops.reference import accumulation_dtype
from moe_parallel.ops.types import RowMap

_ops = torch.ops.moe_parallel


def routed_experts(
    x_TD: Tensor,
    probs_TK: Tensor,
    row_map: RowMap,
    w_gate_up_ED2F: Tensor,
    w_out_EFD: Tensor,
    *,
    main_gradients: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    probs_TK = probs_TK.to(accumulation_dtype(x_TD.dtype))
    y_TD, _ = _ops.routed_experts(
        x_TD, probs_TK, *row_map, w_gate_up_ED2F, w_out_EFD, *(main_gradients or (None, None))
    )
    return y_TD


@fake("routed_experts")
def _(x: Tensor, slots: Tensor, w_gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(slots.size(0), w_gate_up.size(2))


@fake("routed_experts_backward")
def _(
    x: Tensor,
    probs: Tensor,
    w_gate_up: Tensor,
    w_out: Tensor,
    main_gate_up: Tensor | None,
    main_out: Tensor | None,
) -> tuple[Tensor, ...]:
    return (
        rows_like(x),
        probs.new_empty(probs.shape),
        own_gradient(w_gate_up, main_gate_up),
        own_gradient(w_out, main_out),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, main_gate_up, main_out = inputs
    _, gate_up = output
    ctx.mark_non_differentiable(gate_up)
    ctx.set_materialize_grads(False)  # otherwise autograd makes zeros as large as gate_up
    ctx.save_for_backward(*given, gate_up)
    # Not by save_for_backward, because other passes add to them.
    ctx.main_gradients = (main_gate_up, main_out)


@once_differentiable
def _backward(ctx: Any, dy: Tensor | None, dgate_up: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 9
    frozen = not any(ctx.needs_input_grad[5:7])
    dx, dprobs, *dw = _ops.routed_experts_backward(
        dy, *ctx.saved_tensors, *ctx.main_gradients, frozen
    )
    of_weights = (None, None) if frozen else gradients_not_added(dw, ctx.main_gradients)
    return dx, dprobs, None, None, None, *of_weights, None, None


torch.library.register_autograd("moe_parallel::routed_experts", _backward, setup_context=_save)
