"""AoE's selection and its two gradients: through all norms, or through the chosen norms."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_parallel.ops.fp8_norms import fp8_norms
from moe_parallel.ops.native.routing_map import routing_map
from moe_parallel.ops.reference import (
    accumulation_dtype,
    by_falling_rank,
    c_of_chosen,
    check_choice,
)
from moe_parallel.ops.types import Choose, Gradient, Keep, NormScores

_ops = torch.ops.moe_parallel


def norm_topk(
    x_TD: Tensor,
    w_EDR: Tensor,
    k: int | None,
    bias_E: Tensor | None = None,
    *,
    keep: Keep = "nothing",
    gradient: Gradient = "all",
    chosen: Choose | None = None,
    screening: int = 0,
) -> NormScores:
    check_choice(w_EDR.size(0), k, bias_E, keep, gradient, chosen, screening)
    # With gradient="chosen" the backward pass needs only C of the chosen experts.
    keep_all = keep == "all" and gradient == "all" and torch.is_grad_enabled()
    with torch.no_grad():
        if chosen is not None:
            scores, c_TER = _chosen_by(chosen, x_TD, w_EDR, keep, keep_all)
        elif screening > 0:
            assert k is not None
            scores, c_TER = _screened(x_TD, w_EDR, k, bias_E, keep, screening), None
        else:
            norms_TE, experts_TK, c_TKR, c_TER = _ops.norm_topk(
                x_TD, w_EDR, k, bias_E, keep != "nothing", keep_all
            )
            scores = NormScores(norms_TE, experts_TK, c_TKR if keep != "nothing" else None)
    c_TER = c_TER if keep_all else None
    norms_TE, c_TKR = _Gradient.apply(x_TD, w_EDR, *scores, c_TER, gradient, chosen is None)
    return NormScores(norms_TE, scores.experts_TK, c_TKR)


def _chosen_by(
    chosen: Choose, x_TD: Tensor, w_EDR: Tensor, keep: Keep, keep_all: bool
) -> tuple[NormScores, Tensor]:
    """The scores by the rule `chosen`, and C of all experts if it is kept."""
    keep_all = keep_all or keep != "nothing"
    norms_TE, _, _, c_TER = _ops.norm_topk(x_TD, w_EDR, 1, None, False, keep_all)
    experts_TK = chosen(norms_TE)
    c_TKR = c_of_chosen(c_TER, experts_TK) if keep != "nothing" else None
    return NormScores(norms_TE, experts_TK, c_TKR), c_TER


def _screened(
    x_TD: Tensor, w_EDR: Tensor, k: int, bias_E: Tensor | None, keep: Keep, screening: int
) -> NormScores:
    """Norms in FP8 select the candidates, so that a token needs k + screening exact products."""
    norms_TE = fp8_norms(x_TD, w_EDR).to(accumulation_dtype(x_TD.dtype))
    candidates_TC = by_falling_rank(norms_TE, bias_E)[:, : k + screening].contiguous()
    slots, rows_TC, counts = routing_map(candidates_TC, w_EDR.size(0), all_chosen=True)
    c_NR = _ops.grouped_gemm(_ops.permute(x_TD, slots, rows_TC), w_EDR, counts)

    norms_N = torch.linalg.vector_norm(c_NR.to(norms_TE.dtype), dim=1)
    norms_TE.scatter_(1, candidates_TC, norms_N[rows_TC])
    others_TE = torch.ones_like(norms_TE, dtype=torch.bool).scatter(1, candidates_TC, False)
    experts_TK = by_falling_rank(norms_TE, bias_E, others_TE)[:, :k].contiguous()
    if keep == "nothing":
        return NormScores(norms_TE, experts_TK)
    row_TE = torch.zeros_like(others_TE, dtype=torch.int64).scatter(1, candidates_TC, rows_TC)
    return NormScores(norms_TE, experts_TK, c_NR[row_TE.gather(1, experts_TK)])


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
    dc_chosen: Tensor | None,
    x: Tensor,
    w: Tensor,
    norms: Tensor,
    experts: Tensor,
    c: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)


class _Gradient(torch.autograd.Function):
    """Makes the norms and C of the chosen, computed without gradient, functions of x and w.

    `c_chosen` and `c`: C of the chosen experts and of all experts. None: the backward pass
    recomputes it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        norms: Tensor,
        experts: Tensor,
        c_chosen: Tensor | None,
        c: Tensor | None,
        gradient: Gradient,
        all_chosen: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)  # otherwise autograd makes zeros as large as C
        ctx.gradient, ctx.all_chosen, ctx.hands_on = gradient, all_chosen, c_chosen is not None
        ctx.save_for_backward(x, w, norms, experts, c if gradient == "all" else c_chosen)
        return norms.view_as(norms), None if c_chosen is None else c_chosen.view_as(c_chosen)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dnorms: Tensor | None, dc_chosen: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, w, norms, experts, c = ctx.saved_tensors  # read once: checkpointing allows no second
        dnorms = torch.zeros_like(norms) if dnorms is None else dnorms
        dc_chosen = dc_chosen if ctx.hands_on else None  # torch.compile passes an empty tensor
        if ctx.gradient == "all":
            dx, dw = _ops.norm_topk_backward(dnorms, dc_chosen, x, w, norms, experts, c)
        else:
            slots, rows, counts = routing_map(experts, w.size(0), all_chosen=ctx.all_chosen)
            dx, dw = _through_chosen(
                dnorms, dc_chosen, x, w, norms, experts, c, slots, rows, counts
            )
        return dx, dw, *(None,) * 6


def _through_chosen(
    dnorms: Tensor,
    dc_chosen: Tensor | None,
    x: Tensor,
    w: Tensor,
    norms: Tensor,
    experts: Tensor,
    c_chosen: Tensor | None,
    slots: Tensor,
    rows: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """dx and dw of `norm_topk` through the chosen norms only: K products with x instead of E.

    With a = dL/dp / p for the norm p = ||C|| of a chosen expert, dC += a C (0 if p is 0).
    """
    x_rows = _ops.permute(x, slots, rows)
    factors = (dnorms / norms).masked_fill(norms == 0, 0)
    factors = factors.gather(1, experts.clamp(min=0)).unsqueeze(-1)  # empty slots have no row
    if c_chosen is not None:
        dc = factors * c_chosen if dc_chosen is None else factors * c_chosen + dc_chosen
        dc_rows = _ops.permute(dc.to(x.dtype).flatten(0, 1), slots, rows.view(-1, 1))
    else:
        c_rows = _ops.grouped_gemm(x_rows, w, counts)
        dc_rows = (factors.flatten()[slots].unsqueeze(-1) * c_rows).to(x.dtype)
    dw = _ops.grouped_outer(x_rows, dc_rows, counts)
    dx_rows = _ops.grouped_gemm(dc_rows, w.transpose(1, 2), counts)
    return _ops.unpermute(dx_rows, slots, rows, None), dw
