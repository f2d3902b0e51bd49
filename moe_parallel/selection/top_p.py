"""Top-p: a token takes its most probable experts until their probabilities sum to p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens


@dataclass(frozen=True)
class TopP:
    """Dynamic routing (Huang et al. 2024, Eq. 4 to 6); with AoE, over the softmax of norms.

    A token takes experts in order of probability, largest first, until the sum is at least p. It
    also takes the expert that crosses p, so it always has at least one. The probs are the
    probabilities, not renormalized.
    """

    p: float
    strict: bool = False  # stop when the sum exceeds p, as in the authors' code
    most: int | None = None  # maximum number of experts per token; the paper's Table 1 uses 2

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        probabilities_TE = torch.softmax(scores_TE, dim=1)
        probs_TK, experts_TK = torch.sort(probabilities_TE, dim=1, descending=True, stable=True)
        # An expert is needed if the sum of those before it has not reached p. The sums are in fp64
        # so that rounding adds no expert: n equal probabilities need exactly ceil(p n) experts.
        before_TK = probs_TK.detach().double().cumsum(dim=1) - probs_TK.detach().double()
        needed_TK = self._needed(before_TK)
        needed_TK[:, 0] = True
        if self.most is not None:
            needed_TK[:, self.most :] = False
        return Choices(
            experts_TK.masked_fill(~needed_TK, -1), probs_TK, scores_TE, probabilities_TE
        )

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices for given experts: int64 [T, K]; -1: the slot is empty."""
        probabilities_TE = torch.softmax(scores_TE, dim=1)
        probs_TK = probabilities_TE.gather(1, experts_TK.clamp(min=0))
        return Choices(experts_TK, probs_TK, scores_TE, probabilities_TE)

    def _needed(self, before_TK: torch.Tensor) -> torch.Tensor:
        # fp32 probabilities sum to 1 only within rounding. With p = 1 all experts are needed.
        rounding = 1e-6
        if self.strict or self.p == 1:
            return before_TK <= self.p + rounding
        return before_TK < self.p - rounding
