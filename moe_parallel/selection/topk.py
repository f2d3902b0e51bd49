"""Top-K: a token takes the K experts with the highest scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from moe_parallel.selection.choices import Choices, greatest
from moe_parallel.selection.tokens import Tokens


def softmax(scores_TE: torch.Tensor) -> torch.Tensor:
    """Scores as probabilities over all E experts."""
    return torch.softmax(scores_TE, dim=1)


def sigmoid_shares(scores_TE: torch.Tensor) -> torch.Tensor:
    """Sigmoids divided by their sum over all E experts (DeepSeek-V3, section 2.1.2)."""
    # In logarithms, because every sigmoid rounds to 0 if all scores are far below 0.
    return torch.softmax(F.logsigmoid(scores_TE), dim=1)


# The probs of the chosen experts: (scores_TE, probabilities_TE, experts_TK) -> probs_TK.
ProbsOf = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def softmax_of_selected(
    scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
) -> torch.Tensor:
    """The softmax over the scores of the chosen experts (AoE, Algorithm 2).

    It equals the softmax over all experts, renormalized over the chosen ones.
    """
    return torch.softmax(scores_TE.gather(1, experts_TK), dim=1)


def raw_probability(
    scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
) -> torch.Tensor:
    """The probabilities, not renormalized over the chosen experts (Switch Transformer)."""
    return probabilities_TE.gather(1, experts_TK)


def raw_score(
    scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
) -> torch.Tensor:
    """The scores, unchanged: the probs of expert choice with raw scores."""
    return scores_TE.gather(1, experts_TK)


def sigmoid_share_of_selected(
    scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
) -> torch.Tensor:
    """Sigmoids divided by their sum over the chosen experts (DeepSeek-V3, Eq. 13)."""
    return torch.softmax(F.logsigmoid(scores_TE.gather(1, experts_TK)), dim=1)


def sigmoid_of_selected(
    scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
) -> torch.Tensor:
    """The sigmoid. It is for K = 1, where a share would always be 1."""
    return torch.sigmoid(scores_TE.gather(1, experts_TK))


@dataclass(frozen=True)
class WithoutZeroExperts:
    """`probs`, but 0 for a chosen zero expert; the others are divided by their sum (MoE++, code).

    If all choices of a token are zero experts, or the other probs underflow next to that of a zero
    expert, all its probs are 0.
    """

    probs: ProbsOf
    num_free: int  # the last columns of the scores
    num_zero: int  # the first of these

    def __call__(
        self, scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
    ) -> torch.Tensor:
        first = scores_TE.shape[1] - self.num_free
        is_zero_TK = (experts_TK >= first) & (experts_TK < first + self.num_zero)
        probs_TK = self.probs(scores_TE, probabilities_TE, experts_TK).masked_fill(is_zero_TK, 0)
        sums_T1 = probs_TK.sum(dim=1, keepdim=True)
        return probs_TK / (sums_T1 + (sums_T1 == 0))


@dataclass(frozen=True)
class GroupLimit:
    """Experts are chosen only from the groups with the highest scores (DeepSeek-V3, 2.1.2).

    The score of a group is the sum over its best k / topk experts, as in Megatron-Core.
    """

    num_groups: int
    topk: int  # groups that a token may choose from

    def limited(self, ranked_TE: torch.Tensor, scores_TE: torch.Tensor, k: int) -> torch.Tensor:
        """`ranked_TE` with -inf for the experts of all other groups; scores decide ties."""

        def best(x_TE: torch.Tensor) -> torch.Tensor:
            x_TGM = x_TE.unflatten(1, (self.num_groups, -1))
            return x_TGM.topk(max(1, k // self.topk), dim=2).values.sum(dim=2)

        groups = greatest(best(ranked_TE), self.topk, best(scores_TE))
        others_TG = ranked_TE.new_ones(len(ranked_TE), self.num_groups, dtype=torch.bool)
        others_TG.scatter_(1, groups, False)
        size = ranked_TE.shape[1] // self.num_groups
        return ranked_TE.masked_fill(others_TG.repeat_interleave(size, dim=1), -torch.inf)


@dataclass(frozen=True)
class TopK:
    """The K experts with the highest score, or with the highest `ranking(scores)` + bias.

    A ranking keeps the order of the scores, so it matters only beside a bias or groups. Where it
    saturates, the scores themselves decide. On exact ties the lowest index wins.
    """

    k: int
    probs: ProbsOf = softmax_of_selected
    probabilities: Callable[[torch.Tensor], torch.Tensor] = softmax
    ranking: Callable[[torch.Tensor], torch.Tensor] | None = None  # None: the scores themselves
    bias_E: torch.Tensor | None = None  # for the selection only, not in probs (Wang et al. 2024)
    groups: GroupLimit | None = None

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        own_TE = scores_TE.detach()
        if self.bias_E is None and self.groups is None:
            return self.of(scores_TE, greatest(own_TE, self.k))
        ranked_TE = self.ranked(scores_TE)
        if self.bias_E is not None:
            ranked_TE = ranked_TE + self.bias_E
        if self.groups is not None:
            ranked_TE = self.groups.limited(ranked_TE, own_TE, self.k)
        ties_TE = None if self.ranking is None else own_TE
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
