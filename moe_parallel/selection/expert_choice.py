"""Expert choice: each expert takes a fixed number of tokens, those with the highest scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch

from moe_parallel.selection.choices import Choices, slots_of
from moe_parallel.selection.tokens import Tokens


def tokens_taken(factor: float, num_tokens: int, num_experts: int) -> int:
    """round(factor * tokens / n), where a half is rounded up; at least 1, at most all tokens."""
    share = Fraction(str(factor)) * num_tokens / num_experts  # exact; a float may miss a half
    return min(num_tokens, max(1, math.floor(share + Fraction(1, 2))))


def raw(scores_TE: torch.Tensor) -> torch.Tensor:
    """The scores, unchanged."""
    return scores_TE


@dataclass(frozen=True)
class ExpertChoice:
    """Expert choice by token (Zhou et al. 2022; the AoE paper's Table 3 with raw scores, factor 2).

    An expert takes the round(factor * tokens / n) tokens with the highest values in the whole
    micro-batch, over all ranks that route it. The same value is the prob that weights the output.
    On a tie, the earlier token is taken. A token may be taken by any number of experts, or by none.
    """

    factor: float
    ranking: Callable[[torch.Tensor], torch.Tensor]  # scores_TE -> values to rank by, and probs

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        probs_TE = self.ranking(scores_TE)
        probs_AE = tokens.of_micro_batch(probs_TE)
        taken = tokens_taken(self.factor, *probs_AE.shape)
        order_AE = torch.argsort(probs_AE, dim=0, descending=True, stable=True)
        chosen_AE = torch.zeros_like(probs_AE, dtype=torch.bool)
        chosen_AE.scatter_(0, order_AE[:taken], True)
        experts_TK, probs_TK = slots_of(tokens.of_this_rank(chosen_AE), probs_TE)
        return Choices(experts_TK, probs_TK, scores_TE, torch.softmax(scores_TE, dim=1))

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices for given experts: int64 [T, K]; -1: the slot is empty."""
        probs_TK = self.ranking(scores_TE).gather(1, experts_TK.clamp(min=0))
        return Choices(experts_TK, probs_TK, scores_TE, torch.softmax(scores_TE, dim=1))
