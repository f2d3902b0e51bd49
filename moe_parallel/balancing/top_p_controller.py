"""The controller of top-p: p follows the mean number of experts per token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_parallel.balancing.controller import Controller
from moe_parallel.selection.top_p import MovingTopP


class TopPController(Controller):
    """A proportional-integral controller of p (DTop-p, Jin et al. 2025, arXiv 2512.13996).

        e = (K - mean number of experts per token of the step) / E
        p = p_0 + K_p e + K_i (sum of e over all steps),   limited to [1 / E, 1]

    The second number of `state` is p_0 plus K_i times the sum, so that a changed p_0 or K_i moves
    nothing when a run continues. It has the same limits as p: otherwise it would grow while p is at
    a limit, and p could not leave it soon after the error has changed its sign. (If it stayed while
    p is at a limit, p would swing between its limit and p_0 at K = E.) Near the target the loop is
    stable if g (2 K_p + K_i) < 2, with g = 1 / (E P) for P, the probability of an expert that
    crosses p.
    """

    def __init__(
        self,
        initial: float,
        target: float,
        num_experts: int,
        proportional_gain: float,
        integral_gain: float,
    ) -> None:
        """
        Args:
            initial: p_0, the p of the first step.
            target: K.
            num_experts: E.
            proportional_gain: K_p.
            integral_gain: K_i.
        """
        super().__init__([initial, initial], target)
        self.num_experts = num_experts
        self.proportional_gain, self.integral_gain = proportional_gain, integral_gain

    def of(self, rule: Any) -> Any:
        """Top-p with this p. A rule whose p does not move stays as it is."""
        return replace(rule, source=self) if isinstance(rule, MovingTopP) else rule

    @torch.no_grad()
    def move(self, counts: torch.Tensor) -> None:
        choices, tokens = counts.unbind()
        error = (self.target * tokens - choices) / (self.num_experts * tokens.clamp(min=1))
        integral = self._limited(self.state[1].double() + self.integral_gain * error)
        p = self._limited(integral + self.proportional_gain * error)
        self.state.copy_(torch.stack([p, integral]))

    def _limited(self, p: torch.Tensor) -> torch.Tensor:
        return p.clamp(1 / self.num_experts, 1)
