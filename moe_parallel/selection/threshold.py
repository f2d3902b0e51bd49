"""Threshold: an expert computes every token whose score, plus its bias, is above a level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moe_parallel.selection.choices import Choices, chosen_of, slots_of
from moe_parallel.selection.tokens import Tokens

# The probs of all experts, of which those of the chosen ones count: (scores_TE, values_TE,
# chosen_TE) -> probs_TE. A value is a score plus the bias.
Gate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def sigmoid(
    scores_TE: torch.Tensor, values_TE: torch.Tensor, chosen_TE: torch.Tensor
) -> torch.Tensor:
    """The sigmoid of the scores, not divided by a sum (expert threshold routing)."""
    return torch.sigmoid(scores_TE)


def sigmoid_of_value(
    scores_TE: torch.Tensor, values_TE: torch.Tensor, chosen_TE: torch.Tensor
) -> torch.Tensor:
    """The sigmoid of the values, at least 1/2 for an expert that is chosen above level 0."""
    return torch.sigmoid(values_TE)


def softmax_of_scores(
    scores_TE: torch.Tensor, values_TE: torch.Tensor, chosen_TE: torch.Tensor
) -> torch.Tensor:
    """The softmax over the scores of all experts, not renormalized over the chosen ones."""
    return torch.softmax(scores_TE, dim=1)


def raw_value(
    scores_TE: torch.Tensor, values_TE: torch.Tensor, chosen_TE: torch.Tensor
) -> torch.Tensor:
    """The values, unchanged (Routing-Free MoE)."""
    return values_TE


def softmax_of_chosen(
    scores_TE: torch.Tensor, values_TE: torch.Tensor, chosen_TE: torch.Tensor
) -> torch.Tensor:
    """The softmax over the values of the chosen experts, as AoE weights them."""
    # Not by -inf, of which a token without an expert would make NaN.
    lowest = torch.finfo(values_TE.dtype).min
    return torch.softmax(values_TE.masked_fill(~chosen_TE, lowest), dim=1)


@dataclass(frozen=True)
class Threshold:
    """Expert i is chosen if s_i + b_i > level. A token has any number of experts, also none.

    Expert threshold routing (arXiv 2603.11535): the level is 0, and -b_i is the cutoff of expert i.
    Routing-Free MoE (arXiv 2604.00801): the level is theta, and -b_i is learned.

    A value that equals the level is not above it, so that no tie is broken by the number of an
    expert.
    """

    gate: Gate
    level: float = 0.0
    bias_E: torch.Tensor | None = None  # None: 0

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        values_TE = self._values(scores_TE)
        chosen_TE = values_TE > self.level
        experts_TK, probs_TK = slots_of(chosen_TE, self.gate(scores_TE, values_TE, chosen_TE))
        return _choices(experts_TK, probs_TK, scores_TE, values_TE)

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices of given experts: int64 [T, K]; -1: the slot is empty."""
        values_TE = self._values(scores_TE)
        probs_TE = self.gate(scores_TE, values_TE, chosen_of(experts_TK, scores_TE) > 0)
        probs_TK = probs_TE.gather(1, experts_TK.clamp(min=0))
        return _choices(experts_TK, probs_TK, scores_TE, values_TE)

    def _values(self, scores_TE: torch.Tensor) -> torch.Tensor:
        return scores_TE if self.bias_E is None else scores_TE + self.bias_E

    def with_bias(self, bias_E: torch.Tensor) -> Threshold:
        """This rule with `bias_E` added to the scores."""
        return replace(self, bias_E=bias_E)

    def ranked(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """The values without the bias and without gradient."""
        return scores_TE.detach()


def _choices(
    experts_TK: torch.Tensor,
    probs_TK: torch.Tensor,
    scores_TE: torch.Tensor,
    values_TE: torch.Tensor,
) -> Choices:
    probabilities_TE = torch.softmax(scores_TE, dim=1)
    return Choices(experts_TK, probs_TK, scores_TE, probabilities_TE, values_TE=values_TE)
