"""top_p, aoe_top_p: the most probable experts, until their probabilities sum to p.

The rule (`TopP`), the controller of a moving p, the dynamic loss, and the records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from moe_parallel.balancing.controller import Controller
from moe_parallel.balancing.losses import LossContext, RoutingLoss
from moe_parallel.layers import AutonomousLayer, RoutedLayer, Rules, System, register
from moe_parallel.layers.system import SCALED_OUTPUT
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.rules import renormalized, softmax, until_p
from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems.top_p import AoETopPSelection, DynamicChoices, TopPSelection


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
        probabilities_TE = softmax(scores_TE)
        experts_TK, probs_TK, needed_TK = until_p(
            scores_TE, probabilities_TE, self._p(), self.strict
        )
        if self.most is not None:
            needed_TK[:, self.most :] = False
        experts_TK = experts_TK.masked_fill(~needed_TK, -1)
        return self._choices(experts_TK, probs_TK, scores_TE, probabilities_TE)

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices for given experts: int64 [T, K]; -1: the slot is empty."""
        probabilities_TE = softmax(scores_TE)
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
            probs_TK = renormalized(probs_TK, experts_TK >= 0)
        return Choices(experts_TK, probs_TK, scores_TE, probabilities_TE)

    def _p(self) -> float | torch.Tensor:
        return self.p


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

    def _p(self) -> torch.Tensor:
        assert self.source is not None
        return self.source.setting.double()


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


def entropy_loss(choices: Choices, tokens: Tokens) -> torch.Tensor:
    """The dynamic loss: mean entropy of the probabilities, in nats (Huang et al. 2024, Eq. 7).

    Without it, dynamic routing could become less certain and so choose more experts.
    """
    # A probability that underflows to 0 adds 0. Without the clamp its gradient would be infinite.
    p_TE = choices.probabilities_TE
    total = -(p_TE * p_TE.clamp(min=torch.finfo(p_TE.dtype).tiny).log()).sum()
    return tokens.sum(total) / (len(choices.scores_TE) * tokens.num_shares)


def entropy(selection: DynamicChoices, context: LossContext) -> RoutingLoss:
    """The mean entropy of the probabilities over all experts."""
    return RoutingLoss("entropy_loss", selection.moe_entropy_loss_coeff, entropy_loss)


def rules(selection: DynamicChoices) -> Rules:
    """The rules; evaluation may have its own p and a maximum number of experts per token."""
    p, strict = selection.moe_top_p, selection.moe_top_p_strict
    most = selection.moe_inference_max_experts
    trained = TopP if selection.moe_top_p_target_experts is None else MovingTopP
    evaluated, its_p = trained, p
    if selection.moe_inference_top_p is not None:
        evaluated, its_p = TopP, selection.moe_inference_top_p
    renormalizes = selection.moe_top_p_renormalize
    return Rules(
        trained(p, strict, renormalizes=renormalizes),
        evaluated(its_p, strict, most, renormalizes),
    )


def upcycling(selection: DynamicChoices) -> str | None:
    return None if selection.moe_top_p_renormalize else SCALED_OUTPUT


def controller(
    selection: DynamicChoices, num_experts: int, train_iters: int | None
) -> TopPController | None:
    if selection.moe_top_p_target_experts is None:
        return None
    return TopPController(
        selection.moe_top_p,
        selection.moe_top_p_target_experts,
        num_experts,
        selection.moe_top_p_proportional_gain,
        selection.moe_top_p_integral_gain,
    )


TOP_P = register(
    System(
        TopPSelection,
        layer=RoutedLayer,
        rules=rules,
        own_losses=(entropy,),
        controller=controller,
        upcycling=upcycling,
    )
)
AOE_TOP_P = register(
    System(
        AoETopPSelection,
        layer=AutonomousLayer,
        rules=rules,
        own_losses=(entropy,),
        controller=controller,
        upcycling=upcycling,
    )
)
