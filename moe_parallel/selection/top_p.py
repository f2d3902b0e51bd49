"""As many experts per token as it takes for their probabilities to reach p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens


@dataclass(frozen=True)
class TopP:
    """Dynamic routing (Huang et al. 2024, Eq. 4 to 6); with AoE, over the softmax of norms.

    Experts are taken by probability, greatest first, until their sum is at least p; the expert
    that crosses p is taken too, so there is always one. Probs are the probabilities themselves.
    """

    p: float
    strict: bool = False  # until the sum is above p, as in the authors' code
    most: int | None = None  # experts per token at most; the paper's Table 1 infers with 2

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        probabilities_TE = torch.softmax(scores_TE, dim=1)
        probs_TK, experts_TK = torch.sort(probabilities_TE, dim=1, descending=True, stable=True)
        # What stands before an expert decides whether it is still needed. The sums are rounded,
        # and n equal probabilities have to need ceil(p n) experts, not one more: hence fp64.
        before_TK = probs_TK.detach().double().cumsum(dim=1) - probs_TK.detach().double()
        needed_TK = self._needed(before_TK)
        needed_TK[:, 0] = True
        if self.most is not None:
            needed_TK[:, self.most :] = False
        return Choices(
            experts_TK.masked_fill(~needed_TK, -1), probs_TK, scores_TE, probabilities_TE
        )

    def _needed(self, before_TK: torch.Tensor) -> torch.Tensor:
        # fp32 probabilities sum to 1 within a few units of rounding. With p = 1 all are needed.
        rounding = 1e-6
        if self.strict or self.p == 1:
            return before_TK <= self.p + rounding
        return before_TK < self.p - rounding
