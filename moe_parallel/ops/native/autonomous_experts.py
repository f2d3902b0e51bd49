"""The autonomous layer after its selection, as one operator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops import padding
from moe_parallel.ops.native.fake import fake
from moe_parallel.ops.native.main_gradients import gradients_not_added, own_gradient
from moe_parallel.ops.native.packed_rows import rows_like
from moe_parallel.ops.once import once_differentiable
from moe_parallel.ops.reference import accumulation_dtype, check_norms
from moe_parallel.ops.types import RowMap

_ops = torch.ops.moe_parallel


def autonomous_experts(
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
) -> Tensor:
    check_norms(norms_TK, c_TKR, row_map)
    probs_TK = probs_TK.to(accumulation_dtype(x_TD.dtype))
    inputs = (
        x_TD,
        probs_TK,
        *row_map,
        w_down_EDR if c_TKR is None or norms_TK is not None else None,
        w_up_ERW,
        w_p_EDW,
        w_out_EWD,
        c_TKR,
        norms_TK,
        *(main_gradients or (None, None, None)),
        not recompute_gate,
    )
    if missing := padding.missing_columns(x_TD, w_out_EWD.size(1)):
        y_TD, *_ = _Padded.apply(*inputs, missing)
    else:
        y_TD, *_ = _ops.autonomous_experts(*inputs)
    return y_TD


@fake("autonomous_experts")
def _(
    x: Tensor, slots: Tensor, w_up: Tensor, c_TKR: Tensor | None, keep_g: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, (_, rank, width) = slots.size(0), w_up.shape
    return (
        x.new_empty(x.shape),
        x.new_empty(num_rows, width),
        x.new_empty(num_rows if c_TKR is None else 0, rank),
        x.new_empty(num_rows if keep_g else 0, width),
    )


@fake("autonomous_experts_backward")
def _(
    x: Tensor,
    probs: Tensor,
    w_down: Tensor | None,
    w_up: Tensor,
    w_p: Tensor,
    w_out: Tensor,
    c_TKR: Tensor | None,
    norms: Tensor | None,
    main_up: Tensor | None,
    main_p: Tensor | None,
    main_out: Tensor | None,
) -> tuple[Tensor, ...]:
    dw_down = x.new_empty(0) if w_down is None else w_down.new_empty(w_down.shape)
    dc_TKR = x.new_empty(0, w_up.size(1))
    if c_TKR is not None and norms is None:
        dc_TKR = c_TKR.new_empty(c_TKR.shape)
    others = map(own_gradient, (w_up, w_p, w_out), (main_up, main_p, main_out))
    return rows_like(x), probs.new_empty(probs.shape), dw_down, *others, dc_TKR


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # kept: P = x W_p; c_NR, empty if c_TKR was given; C W_up, empty if it is recomputed.
    _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # otherwise autograd makes zeros as large as what is kept
    *given, main_up, main_p, main_out, _ = inputs  # c_TKR and norms are the last of those given
    ctx.joins_norms = given[-1] is not None
    ctx.save_for_backward(*given, *kept)
    ctx.main_gradients = (
        main_up,
        main_p,
        main_out,
    )  # not by save_for_backward, because other passes add to them


def _for_autograd(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """What the C++ operator for the backward pass returns, by input; None: not needed."""
    dx, dprobs, dw_down, *dw, dc_TKR = gradients
    apart = not ctx.joins_norms  # otherwise the gradients of probs and C went on to x and w_down
    needs_w_down, needs_c = ctx.needs_input_grad[5], ctx.needs_input_grad[9]
    return (
        dx,
        dprobs if apart else None,
        None,
        None,
        None,
        dw_down if needs_w_down else None,
        *gradients_not_added(dw, ctx.main_gradients),
        dc_TKR if apart and needs_c else None,
        *(None,) * 5,
    )


@once_differentiable
def _backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 15
    saved = ctx.saved_tensors  # read once: checkpointing allows no second
    gradients = _ops.autonomous_experts_backward(dy, *saved, *ctx.main_gradients)
    return _for_autograd(ctx, gradients)


torch.library.register_autograd("moe_parallel::autonomous_experts", _backward, setup_context=_save)


class _Padded(torch.autograd.Function):
    """The operator on padded weights, of which no copy is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *given, ctx.missing = inputs
        weights = _padded(given[6:9], ctx.missing)
        outputs = _ops.autonomous_experts(*given[:6], *weights, *given[9:])
        _save(ctx, tuple(given), outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 16
        saved, main = ctx.saved_tensors, ctx.main_gradients
        weights = _padded(saved[6:9], ctx.missing)
        sums = [*map(padding.zeros_for, main, weights)]
        dx, dprobs, dw_down, *dw, dc_TKR = _ops.autonomous_experts_backward(
            dy, *saved[:6], *weights, *saved[9:], *sums
        )
        for i, (to, added) in enumerate(zip(main, sums, strict=True)):
            if to is None or added is None:
                dw[i] = padding.without_padding(dw[i], saved[6 + i])
            else:
                to += padding.without_padding(added, to)
        return *_for_autograd(ctx, (dx, dprobs, dw_down, *dw, dc_TKR)), None


def _padded(weights: Sequence[Tensor], missing: int) -> list[Tensor]:
    w_up, w_p, w_out = weights
    columns = [padding.padded_columns(w, missing) for w in (w_up, w_p)]
    return [*columns, padding.padded_rows(w_out, missing)]
