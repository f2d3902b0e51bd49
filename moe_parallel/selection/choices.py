"""What a selection rule decides, in the form that capacity and dispatch take."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Choices:
    """Which experts compute each token, and with what weight.

    Shape suffixes: T tokens on this rank, K slots per token (first choice first), E all experts.
    """

    experts_TK: torch.Tensor  # int64; -1: the slot is empty (not chosen, or dropped)
    gates_TK: torch.Tensor  # fp32, differentiable; the weight of that expert's output
    scores_TE: torch.Tensor  # fp32; router logits or norms, higher ranks first

    def tokens_per_expert(self) -> torch.Tensor:
        """How many tokens chose each expert: float32 [E]."""
        num_experts = self.scores_TE.shape[1]
        # A bin of its own for empty slots, so that no size depends on data (a sync on a GPU).
        bins = (self.experts_TK + 1).flatten()
        counts = torch.zeros(num_experts + 1, device=bins.device)
        return counts.scatter_add_(0, bins, torch.ones_like(bins, dtype=counts.dtype))[1:]
