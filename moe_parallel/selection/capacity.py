"""Expert capacity: drops the choices that a full expert does not accept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens

DropOrder = Callable[[Choices], torch.Tensor]


def by_probability(choices: Choices) -> torch.Tensor:
    """All slots, largest probs first; on a tie, earlier tokens first: [T * K]."""
    return torch.argsort(choices.probs_TK.detach().flatten(), descending=True, stable=True)


def by_position(choices: Choices) -> torch.Tensor:
    """All slots in the order of tokens; all first choices precede all second choices: [T * K]."""
    num_tokens, k = choices.experts_TK.shape
    slots_TK = torch.arange(num_tokens * k, device=choices.experts_TK.device).view(num_tokens, k)
    return slots_TK.t().flatten()


DROP_ORDERS: dict[str, DropOrder] = {"probs": by_probability, "position": by_position}


@dataclass(frozen=True)
class Capacity:
    """An expert accepts at most ceil(T * k / E * factor) of T tokens.

    With Z free experts it is ceil(T * k * tau / (tau E + Z) * factor), and for a free expert the
    same without the first tau (MoE++). With the factor 1 they hold all T * k choices.

    These are the tokens that one rank routes. With context parallelism they are those that it would
    route without: the ranks that share a stretch of the sequences between them drop together.

    Other choices are dropped. A dropped choice adds 0 to the output of the layer, so the residual
    connection alone carries the token if all its choices are dropped. The probs of a token's other
    choices do not change.
    """

    factor: float
    order: DropOrder
    pad: bool  # fill every expert's input with zero rows up to its capacity
    k: int = 1  # experts per token; 1 if their number varies or must not count
    num_free: int = 0  # Z
    tau: float = 1.0  # the share of a free expert is 1 / tau times that of another

    def rows_per_expert(self, num_tokens: int, num_experts: int) -> int:
        """The limit of an expert that is not free."""
        return self._limit(num_tokens, num_experts, Fraction(str(self.tau)))

    def _limit(self, num_tokens: int, num_experts: int, share: Fraction) -> int:
        # Fractions are exact: 200 * 2 / 8 * 1.1 is 55, but slightly more in floating point.
        share /= Fraction(str(self.tau)) * num_experts + self.num_free
        return math.ceil(Fraction(num_tokens * self.k) * share * Fraction(str(self.factor)))

    def keep(self, choices: Choices, tokens: Tokens) -> Choices:
        """`choices` without those beyond the capacity of an expert; their slots become -1."""
        if tokens.num_shares == tokens.num_stretches:
            experts_TK = self._kept(choices)
        else:
            stretches = (
                tokens.of_micro_batch(x_TK).chunk(tokens.num_stretches)
                for x_TK in (choices.experts_TK, choices.probs_TK)
            )
            kept = [
                self._kept(replace(choices, experts_TK=experts_TK, probs_TK=probs_TK))
                for experts_TK, probs_TK in zip(*stretches, strict=True)
            ]
            experts_TK = tokens.of_this_rank(torch.cat(kept))
        return replace(choices, experts_TK=experts_TK, all_chosen=False, max_rows=None)

    def _kept(self, choices: Choices) -> torch.Tensor:
        """The experts of all choices that are not dropped: int64 [T, K]. -1: the slot is empty."""
        num_tokens, k = choices.experts_TK.shape
        num_scores = choices.scores_TE.shape[1]
        slots = self.order(choices)
        # A stable sort by expert keeps the order inside each expert; empty slots (-1) come first.
        experts, by_expert = torch.sort(choices.experts_TK.flatten()[slots], stable=True)
        # No size may depend on data, because the host would wait for a GPU.
        bins = experts + 1
        counts = bins.new_zeros(num_scores + 1).scatter_add_(0, bins, torch.ones_like(bins))
        starts = torch.cumsum(counts, 0) - counts
        place = torch.arange(len(experts), device=experts.device) - starts[bins]
        limit: torch.Tensor | int = self.rows_per_expert(num_tokens, num_scores - self.num_free)
        if self.num_free:
            of_free = self._limit(num_tokens, num_scores - self.num_free, Fraction(1))
            limit = torch.where(experts < num_scores - self.num_free, limit, of_free)
        kept = torch.empty_like(experts)
        kept[slots[by_expert]] = experts.masked_fill(place >= limit, -1)
        return kept.view(num_tokens, k)
