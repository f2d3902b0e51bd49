"""Top-K: a token takes the K experts with the highest scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moe_parallel.selection.choices import Choices, greatest
from moe_parallel.selection.rules import (
    GroupLimit,
    ProbsOf,
    Ranking,
    ranked_for_topk,
    softmax,
    softmax_of_selected,
)
from moe_parallel.selection.tokens import Tokens


@dataclass(frozen=True)
class TopK:
    """The K experts with the highest score, or with the highest `ranking(scores)` + bias.

    On exact ties the lowest index wins. `ranked_for_topk` describes the options.
    """

    k: int
    probs: ProbsOf = softmax_of_selected
    probabilities: Callable[[torch.Tensor], torch.Tensor] = softmax
    ranking: Ranking | None = None
    bias_E: torch.Tensor | None = None
    groups: GroupLimit | None = None

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        ranked_TE, ties_TE = ranked_for_topk(
            scores_TE.detach(), self.k, self.ranking, self.bias_E, self.groups
        )
        return self.of(scores_TE, greatest(ranked_TE, self.k, ties_TE))

    def ranked(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """The values by which experts are ranked, without the bias and without gradient."""
        ranked_TE = scores_TE.detach()
        return ranked_TE if self.ranking is None else self.ranking(ranked_TE)

    def with_bias(self, bias_E: torch.Tensor) -> TopK:
        """This rule with `bias_E` added for the selection."""
        return replace(self, bias_E=bias_E)

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices for given experts: int64 [T, K]."""
        probabilities_TE = self.probabilities(scores_TE)
        probs_TK = self.probs(scores_TE, probabilities_TE, experts_TK)
        return Choices(experts_TK, probs_TK, scores_TE, probabilities_TE, all_chosen=True)


@dataclass(frozen=True)
class RoundRobin:
    """Experts are chosen in turn, whatever the scores. The balanced load is for benchmarks.

    `of` computes the probs of the chosen experts.
    """

    of: TopK

    def with_bias(self, bias_E: torch.Tensor) -> RoundRobin:
        """This rule, unchanged: neither scores nor a bias affect it."""
        return self

    def ranked(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """The values by which `of` would rank experts."""
        return self.of.ranked(scores_TE)

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        num_tokens, num_experts = scores_TE.shape
        slots = torch.arange(num_tokens * self.of.k, device=scores_TE.device)
        return self.of.of(scores_TE, (slots % num_experts).view(num_tokens, self.of.k))
