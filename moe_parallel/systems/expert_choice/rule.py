"""expert_choice, aoe_expert_choice: each expert takes the tokens with the highest scores for it.

In evaluation tokens choose experts, because an expert's choice uses later tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch

from moe_parallel.layers import AutonomousLayer, RoutedLayer, Rules, System, register
from moe_parallel.selection.choices import Choices, slots_of
from moe_parallel.selection.rules import raw_probability, raw_score, softmax
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.expert_choice import (
    AoEExpertChoiceSelection,
    ExpertChoiceSelection,
    ExpertsChoose,
)


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
        probabilities_TE = torch.softmax(scores_TE, dim=1)
        # Of several ranks' tokens, this one's share varies.
        rows = taken * scores_TE.shape[1] if tokens.num_shares == 1 else None
        return Choices(experts_TK, probs_TK, scores_TE, probabilities_TE, max_rows=rows)

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices for given experts: int64 [T, K]; -1: the slot is empty."""
        probs_TK = self.ranking(scores_TE).gather(1, experts_TK.clamp(min=0))
        return Choices(experts_TK, probs_TK, scores_TE, torch.softmax(scores_TE, dim=1))


def rules(selection: ExpertsChoose) -> Rules:
    factor = selection.moe_expert_choice_capacity_factor
    by_probability = selection.moe_expert_choice_scores == "softmax"
    ranking = softmax if by_probability else raw
    probs = raw_probability if by_probability else raw_score
    # In evaluation a token takes the mean number of experts in training, with a half rounded up.
    return Rules(ExpertChoice(factor, ranking), TopK(max(1, math.floor(factor + 0.5)), probs))


EXPERT_CHOICE = register(System(ExpertChoiceSelection, layer=RoutedLayer, rules=rules))
AOE_EXPERT_CHOICE = register(System(AoEExpertChoiceSelection, layer=AutonomousLayer, rules=rules))
