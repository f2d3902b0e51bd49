"""The result of a selection rule, which capacity and dispatch take as input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from moe_parallel.selection import rules
from moe_parallel.selection.tokens import Tokens


@dataclass(frozen=True)
class Choices:
    """The experts that compute each token, and their probs.

    Shape suffixes: T tokens on this rank, K slots per token (first choice first), E all experts,
    R low-rank size, D model width.
    """

    experts_TK: torch.Tensor  # int64; -1: the slot is empty (not chosen, or dropped)
    probs_TK: torch.Tensor  # fp32, differentiable; the weight of that expert's output
    scores_TE: torch.Tensor  # fp32; router logits or norms, higher ranks first
    probabilities_TE: torch.Tensor  # fp32, differentiable; the scores normalized to sum to 1
    c_TKR: torch.Tensor | None = None  # C = x W_down of the chosen experts, for their use
    all_chosen: bool = False  # a promise that no slot is empty, so that no wait for a GPU is needed
    max_rows: int | None = None  # of the row map, see `ops.reference`; None: as many as choices
    norms_TK: torch.Tensor | None = None  # of c_TKR, if the experts differentiate them
    output_TD: torch.Tensor | None = None  # of neurons that compute every token; it is added
    values_TE: torch.Tensor | None = None  # differentiable; what a threshold compares
    _counts_E: torch.Tensor | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def number(self) -> int | None:
        """The number of choices. None: the host does not know it without a wait for a GPU."""
        return self.experts_TK.numel() if self.all_chosen else None

    def tokens_per_expert(self) -> torch.Tensor:
        """The number of tokens that chose each expert: float32 [E]. Cached: do not modify it."""
        if self._counts_E is None:  # no cached_property: torch.compile does not trace its lock
            counts_E = self._sum_by_expert(torch.ones_like(self.probs_TK))
            object.__setattr__(self, "_counts_E", counts_E)
            return counts_E
        return self._counts_E

    def chosen(self) -> torch.Tensor:
        """1 where a token chose an expert, otherwise 0: in the dtype of the scores, [T, E]."""
        return chosen_of(self.experts_TK, self.scores_TE)

    def probs_per_expert(self) -> torch.Tensor:
        """The sum of the probs of each expert, differentiable: float32 [E]."""
        return self._sum_by_expert(self.probs_TK)

    def _sum_by_expert(self, values_TK: torch.Tensor) -> torch.Tensor:
        # Empty slots have their own bin, so that no size depends on data (a sync on a GPU).
        bins = (self.experts_TK + 1).flatten()
        sums = values_TK.new_zeros(self.scores_TE.shape[1] + 1)
        return sums.scatter_add(0, bins, values_TK.flatten())[1:]


class Rule(Protocol):
    """A function from scores to choices."""

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        """`scores_TE`: fp32, router logits or norms."""
        ...


class BiasedRule(Rule, Protocol):
    """A rule that can add a balancing bias for the selection."""

    def with_bias(self, bias_E: torch.Tensor) -> Rule:
        """The rule that adds `bias_E`, fp32, to the values by which it ranks experts."""
        ...

    def ranked(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """The values by which it ranks experts, without the bias and without gradient."""
        ...


def chosen_of(experts_TK: torch.Tensor, scores_TE: torch.Tensor) -> torch.Tensor:
    """1 where an expert is in a slot of a token, otherwise 0: [T, E], in the scores' dtype."""
    num_tokens, num_experts = scores_TE.shape
    chosen_TE = scores_TE.new_zeros(num_tokens, num_experts + 1)  # 0: empty slots
    return chosen_TE.scatter_(1, experts_TK + 1, 1.0)[:, 1:]


def slots_of(chosen_TE: torch.Tensor, probs_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts a mask, with any number of experts per token, to slots with K = E.

    Args:
        chosen_TE: bool; the experts that compute each token.
        probs_TE: fp32; slots are sorted by probs, largest first, and by expert on a tie.

    Returns (experts_TK, probs_TK).
    """
    ranked_TE = probs_TE.detach().masked_fill(~chosen_TE, -torch.inf)
    experts_TE = torch.argsort(ranked_TE, dim=1, descending=True, stable=True)
    filled_TE = chosen_TE.gather(1, experts_TE)
    return experts_TE.masked_fill(~filled_TE, -1), probs_TE.gather(1, experts_TE)


def greatest(values_TE: torch.Tensor, k: int, ties_TE: torch.Tensor | None = None) -> torch.Tensor:
    """`rules.greatest`, faster on a CPU: int64 [T, k]."""
    operator = torch.ops.moe_parallel.greatest
    chosen_TK: torch.Tensor = operator(values_TE.detach(), k, ties_TE)
    return chosen_TK


# An operator, because what it does depends on the values, which torch.compile cannot follow.
torch.library.define("moe_parallel::greatest", "(Tensor values, int k, Tensor? ties) -> Tensor")


@torch.library.impl("moe_parallel::greatest", "CUDA")
def _greatest_on_gpu(values_TE: torch.Tensor, k: int, ties_TE: torch.Tensor | None) -> torch.Tensor:
    """By sorting all, because the host would wait to know where values are equal."""
    return rules.greatest(values_TE, k, ties_TE).contiguous()


@torch.library.impl("moe_parallel::greatest", "CPU")
def _greatest_on_cpu(values_TE: torch.Tensor, k: int, ties_TE: torch.Tensor | None) -> torch.Tensor:
    """torch.topk is several times as fast as a stable sort, but takes any of several equal values.

    They are equal if one of the k is not larger than the next, or than the largest of the rest.
    """
    values_TK, experts_TK = values_TE.topk(k, dim=1)
    next_T1 = values_TE.scatter(1, experts_TK, -torch.inf).amax(dim=1, keepdim=True)
    falls_TK = values_TK > torch.cat([values_TK[:, 1:], next_T1], dim=1)
    tied = falls_TK.logical_not().any(dim=1).nonzero()[:, 0]
    ties = None if ties_TE is None else ties_TE[tied]
    experts_TK[tied] = rules.greatest(values_TE[tied], k, ties)
    return experts_TK


@torch.library.register_fake("moe_parallel::greatest")
def _(values_TE: torch.Tensor, k: int, ties_TE: torch.Tensor | None) -> torch.Tensor:
    return values_TE.new_empty(values_TE.shape[0], k, dtype=torch.int64)


def best_first(scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
    """The experts of each token by score, largest first; empty slots (-1) come last."""
    ranked_TK = scores_TE.detach().gather(1, experts_TK.clamp(min=0))
    ranked_TK = ranked_TK.masked_fill(experts_TK < 0, -torch.inf)
    return experts_TK.gather(1, ranked_TK.argsort(dim=1, descending=True, stable=True))
