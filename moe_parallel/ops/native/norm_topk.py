"""AoE's selection and its two gradients: through all norms, or through the chosen norms."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake, fake_like
from moe_parallel.ops.native.routing_map import routing_map
from moe_parallel.ops.once import once_differentiable
from moe_parallel.ops.reference import accumulation_dtype, c_of_chosen, check_choice
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
    max_rows: int | None = None,
) -> NormScores:
    check_choice(w_EDR.size(0), k, bias_E, keep, gradient, chosen)
    # A backward pass that needs C of the chosen experts only, or none, keeps no more.
    if keep == "all" and not (gradient == "all" and torch.is_grad_enabled()):
        keep = "chosen"
    c_TER = None
    with torch.no_grad():
        if chosen is not None:
            scores, c_TER = _chosen_by(chosen, x_TD, w_EDR, keep)
        else:
            norms_TE, experts_TK, c_TKR, c_TER = _ops.norm_topk(x_TD, w_EDR, k, bias_E, keep)
            scores = NormScores(norms_TE, experts_TK, c_TKR if keep != "nothing" else None)
    c_TER = c_TER if keep == "all" else None
    norms_TE, c_TKR = _Gradient.apply(
        x_TD, w_EDR, *scores, c_TER, gradient, chosen is None, max_rows
    )
    return NormScores(norms_TE, scores.experts_TK, c_TKR)


def _chosen_by(
    chosen: Choose, x_TD: Tensor, w_EDR: Tensor, keep: Keep
) -> tuple[NormScores, Tensor]:
    """The scores by the rule `chosen`, and C of all experts unless nothing is kept."""
    of_all: Keep = "nothing" if keep == "nothing" else "all"
    norms_TE, _, _, c_TER = _ops.norm_topk(x_TD, w_EDR, 0, None, of_all)
    experts_TK = chosen(norms_TE)
    c_TKR = c_of_chosen(c_TER, experts_TK) if keep != "nothing" else None
    return NormScores(norms_TE, experts_TK, c_TKR), c_TER


@fake("norm_topk")
def _(x: Tensor, w: Tensor, k: int, keep: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, (experts, _, rank) = x.size(0), w.shape
    return (
        x.new_empty(tokens, experts, dtype=accumulation_dtype(x.dtype)),
        x.new_empty(tokens, k, dtype=torch.int64),
        x.new_empty(0 if keep == "nothing" else tokens, k, rank),
        x.new_empty(tokens if keep == "all" else 0, experts, rank),
    )


fake_like("norm_topk_backward", "x", "w")
fake_like("norm_topk_chosen_backward", "x", "w")


class _Gradient(torch.autograd.Function):
    """Makes the norms and C of the chosen, computed without gradient, functions of x and w.

    c_TKR and c_TER: C of the chosen experts and of all experts. None: the backward pass
    recomputes it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        norms: Tensor,
        experts: Tensor,
        c_TKR: Tensor | None,
        c_TER: Tensor | None,
        gradient: Gradient,
        all_chosen: bool,
        max_rows: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)  # otherwise autograd makes zeros as large as C
        ctx.gradient, ctx.passes_on_c = gradient, c_TKR is not None
        ctx.num_rows = experts.numel() if all_chosen else None
        ctx.max_rows = max_rows
        ctx.save_for_backward(x, w, norms, experts, c_TER if gradient == "all" else c_TKR)
        return norms.view_as(norms), None if c_TKR is None else c_TKR.view_as(c_TKR)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dnorms: Tensor | None, dc_TKR: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, w, norms, experts, c = ctx.saved_tensors  # read once: checkpointing allows no second
        dnorms = torch.zeros_like(norms) if dnorms is None else dnorms
        dc_TKR = dc_TKR if ctx.passes_on_c else None  # torch.compile passes an empty tensor
        if ctx.gradient == "all":
            dx, dw = _ops.norm_topk_backward(dnorms, dc_TKR, x, w, norms, experts, c)
        else:
            slots, rows, counts = routing_map(
                experts, w.size(0), num_rows=ctx.num_rows, max_rows=ctx.max_rows
            )
            dx, dw = _ops.norm_topk_chosen_backward(
                dnorms, dc_TKR, x, w, norms, experts, c, slots, rows, counts
            )
        return dx, dw, *(None,) * 7
