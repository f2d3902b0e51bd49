"""ReLU: a token takes every expert whose score is above 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_parallel.selection.choices import Choices, slots_of
from moe_parallel.selection.tokens import Tokens


@dataclass(frozen=True)
class ReLU:
    """ReMoE (Wang et al., ICLR 2025, arXiv 2412.14711): the probs are ReLU(score).

    A token may have any number of experts, also none. The probs are not normalized. They are
    continuous in the scores: an expert enters and leaves with a prob of 0.
    """

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        probs_TE = torch.relu(scores_TE)
        experts_TK, probs_TK = slots_of(probs_TE > 0, probs_TE)
        return Choices(experts_TK, probs_TK, scores_TE, torch.softmax(scores_TE, dim=1))

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices of given experts: int64 [T, K]; -1: the slot is empty."""
        probs_TK = torch.relu(scores_TE).gather(1, experts_TK.clamp(min=0))
        return Choices(experts_TK, probs_TK, scores_TE, torch.softmax(scores_TE, dim=1))
