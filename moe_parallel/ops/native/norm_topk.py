"""AoE's selection. Two gradients: through all norms, or through those of the chosen experts."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_parallel.ops.native.permute import routing_map
from moe_parallel.ops.native.screening import screened_topk
from moe_parallel.ops.reference import accumulation_dtype, check_choice
from moe_parallel.ops.types import Scores

_ops = torch.ops.moe_parallel


def norm_topk(
    x_TD: Tensor,
    w_EDR: Tensor,
    k: int,
    bias_E: Tensor | None = None,
    *,
    activations: bool = False,
    selected_gradient: bool = False,
    keep: bool = False,
    screening: int = 0,
) -> Scores:
    check_choice(w_EDR.size(0), k, screening, selected_gradient)
    if selected_gradient:
        kept = activations or keep
        norms_TE, experts_TK, c_TKR = _SelectedGradient.apply(
            x_TD, w_EDR, k, bias_E, kept, screening
        )
    else:
        kept = keep and torch.is_grad_enabled()
        norms_TE, experts_TK, c_TKR, _ = _ops.norm_topk(x_TD, w_EDR, k, bias_E, activations, kept)
    return Scores(norms_TE, experts_TK, c_TKR if activations else None)


@torch.library.register_fake("moe_parallel::norm_topk")
def _(
    x: Tensor, w: Tensor, k: int, bias: Tensor | None, keep_chosen: bool, keep_all: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, (experts, _, rank) = x.size(0), w.shape
    return (
        x.new_empty(tokens, experts, dtype=accumulation_dtype(x.dtype)),
        x.new_empty(tokens, k, dtype=torch.int64),
        x.new_empty(tokens if keep_chosen else 0, k, rank),
        x.new_empty(tokens if keep_all else 0, experts, rank),
    )


@torch.library.register_fake("moe_parallel::norm_topk_backward")
def _(
    dnorms: Tensor,
    dchosen: Tensor | None,
    x: Tensor,
    w: Tensor,
    norms: Tensor,
    experts: Tensor,
    all: Tensor,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w, _, _, ctx.keep_chosen, _ = inputs
    norms, experts, _, all = output
    ctx.mark_non_differentiable(experts, all)
    ctx.set_materialize_grads(False)  # or there would be zeros as large as C
    ctx.save_for_backward(x, w, norms, experts, all)


@once_differentiable
def _backward(
    ctx: Any, dnorms: Tensor | None, dexperts: None, dchosen: Tensor | None, dall: None
) -> tuple[Tensor | None, ...]:
    x, w, norms, experts, all = ctx.saved_tensors  # once: checkpointing allows no second time
    dnorms = torch.zeros_like(norms) if dnorms is None else dnorms
    dchosen = dchosen if ctx.keep_chosen else None  # a compiler passes zeros of no size
    dx, dw = _ops.norm_topk_backward(dnorms, dchosen, x, w, norms, experts, all)
    return dx, dw, None, None, None, None


torch.library.register_autograd("moe_parallel::norm_topk", _backward, setup_context=_save)


class _SelectedGradient(torch.autograd.Function):
    """With a = dL/dp / p for the norm p = ||C|| of a chosen expert, dC += a C (0 where p is 0).

    So the backward pass has K products with x instead of E.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, k: int, bias: Tensor | None, keep: bool, screening: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        if screening > 0:
            norms, experts, chosen = screened_topk(x, w, k, bias, screening)
            chosen = chosen if keep else chosen.new_empty(0, *chosen.shape[1:])
        else:
            norms, experts, chosen, _ = _ops.norm_topk(x, w, k, bias, keep, False)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        ctx.keep = keep
        ctx.save_for_backward(x, w, norms, experts, chosen)
        return norms, experts, chosen

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dnorms: Tensor | None, dexperts: None, dchosen: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, w, norms, experts, chosen = ctx.saved_tensors
        dnorms = torch.zeros_like(norms) if dnorms is None else dnorms
        slots, rows, counts = routing_map(experts, w.size(0), all_chosen=True)
        x_rows = _ops.permute(x, slots, rows)
        factors = (dnorms / norms).masked_fill(norms == 0, 0).gather(1, experts).unsqueeze(-1)
        if ctx.keep:
            dc = factors * chosen if dchosen is None else factors * chosen + dchosen
            dc_rows = _ops.permute(dc.to(x.dtype).flatten(0, 1), slots, rows.view(-1, 1))
        else:
            factors_of_rows = factors.flatten()[slots].unsqueeze(-1)
            dc_rows = (factors_of_rows * _ops.grouped_gemm(x_rows, w, counts)).to(x.dtype)
        dw = _ops.grouped_outer(x_rows, dc_rows, counts)
        dx_rows = _ops.grouped_gemm(dc_rows, w.transpose(1, 2), counts)
        return _ops.unpermute(dx_rows, slots, rows, None), dw, None, None, None, None
