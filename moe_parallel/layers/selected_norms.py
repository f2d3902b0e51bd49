"""Norms through which only the chosen experts learn.

Legend: T tokens, E experts, K choices per token, D model width, R low-rank size, N chosen rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moe_parallel.ops import Ops
from moe_parallel.ops.reference import accumulation_dtype


def norms_of_selected(
    x_TD: torch.Tensor,
    w_down_EDR: torch.Tensor,
    norms_TE: torch.Tensor,
    chosen_TK: torch.Tensor,
    ops: Ops,
) -> torch.Tensor:
    """`norms_TE`, whose gradient reaches x and W_down from the chosen experts only.

    With a = dL/dp / p for the norm p = ||C|| of a chosen expert, dC = a C (0 where p is 0). C of
    the chosen rows is computed anew in the backward pass: K products with x instead of E.

    Args:
        norms_TE: ||x W_down^i||, computed without gradient.
        chosen_TK: int64, the chosen experts; -1: none.
    """
    return _SelectedNorms.apply(x_TD, w_down_EDR, norms_TE, chosen_TK, ops)


class _SelectedNorms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        w_down_EDR: torch.Tensor,
        norms_TE: torch.Tensor,
        chosen_TK: torch.Tensor,
        ops: Ops,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_TD, w_down_EDR, chosen_TK)
        ctx.ops = ops
        return norms_TE.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        x_TD, w_down_EDR, chosen_TK = ctx.saved_tensors
        rows = ctx.ops.routing_map(chosen_TK, len(w_down_EDR))
        token_N = rows.slots_N.div(chosen_TK.shape[1], rounding_mode="floor")
        gradient_N = gradients[0][token_N, chosen_TK.flatten()[rows.slots_N]]
        with torch.enable_grad():
            x_TD, w_down_EDR = x_TD.detach(), w_down_EDR.detach()
            inputs = [x_TD.requires_grad_(), w_down_EDR.requires_grad_()]
            c_NR = ctx.ops.grouped_gemm(ctx.ops.permute(x_TD, rows), w_down_EDR, rows.counts_E)
            norms_N = torch.linalg.vector_norm(c_NR.to(accumulation_dtype(c_NR.dtype)), dim=1)
        return (*torch.autograd.grad(norms_N, inputs, gradient_N), None, None, None)
