"""Top-p: a token takes its most probable experts until their probabilities sum to p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens

_ROUNDING = 1e-6  # fp32 probabilities sum to 1 only within it


@dataclass(frozen=True)
class TopP:
    """Dynamic routing (Huang et al. 2024, Eq. 4 to 6); with AoE, over the softmax of norms.

    A token takes experts in order of probability, largest first, until the sum is at least p. It
    also takes the expert that crosses p, so it always has at least one. The probs are the
    probabilities, or these divided by their sum over the chosen experts. The choices have E slots
    per token (K = E); those after the last expert taken hold -1.
    """

    p: float
    strict: bool = False  # stop when the sum exceeds p, as in the authors' code
    most: int | None = None  # maximum number of experts per token; the paper's Table 1 uses 2
    renormalizes: bool = False

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        probabilities_TE = torch.softmax(scores_TE, dim=1)
        # By scores, which differ where their probabilities round to the same number.
        experts_TK = torch.argsort(scores_TE.detach(), dim=1, descending=True, stable=True)
        probs_TK = probabilities_TE.gather(1, experts_TK)
        # An expert is needed if the sum of those before it has not reached p. The sums are in fp64
        # so that rounding adds no expert: n equal probabilities need exactly ceil(p n) experts.
        before_TK = probs_TK.detach().double().cumsum(dim=1) - probs_TK.detach().double()
        needed_TK = self._needed(before_TK)
        needed_TK[:, 0] = True
        if self.most is not None:
            needed_TK[:, self.most :] = False
        return self._choices(
            experts_TK.masked_fill(~needed_TK, -1), probs_TK, scores_TE, probabilities_TE
        )

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices for given experts: int64 [T, K]; -1: the slot is empty."""
        probabilities_TE = torch.softmax(scores_TE, dim=1)
        probs_TK = probabilities_TE.gather(1, experts_TK.clamp(min=0))
        return self._choices(experts_TK, probs_TK, scores_TE, probabilities_TE)

    def _choices(
        self,
        experts_TK: torch.Tensor,
        probs_TK: torch.Tensor,
        scores_TE: torch.Tensor,
        probabilities_TE: torch.Tensor,
    ) -> Choices:
        if self.renormalizes:
            probs_TK = probs_TK.masked_fill(experts_TK < 0, 0)
            sums_T1 = probs_TK.sum(dim=1, keepdim=True)
            probs_TK = probs_TK / (sums_T1 + (sums_T1 == 0))  # 0: a replayed token without experts
        return Choices(experts_TK, probs_TK, scores_TE, probabilities_TE)

    def _needed(self, before_TK: torch.Tensor) -> torch.Tensor:
        # With p = 1 all experts are needed.
        if self.strict or self.p == 1:
            return before_TK <= self.p + _ROUNDING
        return before_TK < self.p - _ROUNDING


class Setting(Protocol):
    """Holds a number that changes between steps."""

    @property
    def setting(self) -> torch.Tensor:
        """The current number, fp32 []."""
        ...


@dataclass(frozen=True)
class MovingTopP(TopP):
    """Top-p with a p that changes between steps (DTop-p). `p` is that of the first step."""

    source: Setting | None = None  # of p; set before the first call

    def _needed(self, before_TK: torch.Tensor) -> torch.Tensor:
        assert self.source is not None
        p = self.source.setting.double()
        # Not by `if`, because the host would wait for the device.
        inclusive = torch.full_like(p, self.strict, dtype=torch.bool) | (p == 1)
        return before_TK < p + torch.where(inclusive, _ROUNDING, -_ROUNDING)
