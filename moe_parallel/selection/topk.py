"""The K experts with the highest scores."""

from __future__ import annotations

import torch

from moe_parallel.selection.choices import Choices


def topk_of_logits(logits_TE: torch.Tensor, k: int) -> Choices:
    """Softmax top-K routing (Shazeer et al. 2017; K=1 as in Switch Transformer).

    K > 1: gates are the softmax over the selected logits, which equals the softmax over all,
    renormalised over the selected. K = 1: that would be the constant 1 and the router would learn
    nothing from the language loss, so the gate is the raw probability.

    Args:
        logits_TE: fp32 [T, E], from the router.
        k: experts per token, 1 <= k <= E.
    """
    selected_TK, experts_TK = torch.topk(logits_TE, k, dim=1)
    if k == 1:
        gates_TK = torch.softmax(logits_TE, dim=1).gather(1, experts_TK)
    else:
        gates_TK = torch.softmax(selected_TK, dim=1)
    return Choices(experts_TK, gates_TK, logits_TE)


def gates_of_norms(norms_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
    """AoE's gates: softmax over the norms of the selected experts (AoE paper, Algorithm 2).

    Args:
        norms_TE: fp32 [T, E], ||x W_down^i||_2.
        experts_TK: int64 [T, K], the experts with the K greatest norms.
    """
    gates_TK = torch.softmax(norms_TE.gather(1, experts_TK), dim=1)
    return Choices(experts_TK, gates_TK, norms_TE)
