"""relu: every expert with a positive router logit (ReMoE, Wang et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from moe_parallel.balancing.controller import LossCoefficient
from moe_parallel.balancing.losses import LossContext, RoutingLoss, weighted_by_load
from moe_parallel.layers import RoutedLayer, Rules, System, register
from moe_parallel.selection.choices import Choices, slots_of
from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems.relu import ReLUSelection


@dataclass(frozen=True)
class ReLU:
    """ReMoE (Wang et al., ICLR 2025, arXiv 2412.14711): the probs are ReLU(score).

    A token may have any number of experts, also none. The probs are not normalized. They are
    continuous in the scores: an expert enters and leaves with a prob of 0.
    """

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        probs_TE = torch.relu(scores_TE)
        experts_TK, probs_TK = slots_of(probs_TE > 0, probs_TE)
        return Choices(experts_TK, probs_TK, scores_TE, torch.softmax(scores_TE, dim=1))

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices of given experts: int64 [T, K]; -1: the slot is empty."""
        probs_TK = torch.relu(scores_TE).gather(1, experts_TK.clamp(min=0))
        return Choices(experts_TK, probs_TK, scores_TE, torch.softmax(scores_TE, dim=1))


def l1_loss(choices: Choices, tokens: Tokens, target: float) -> torch.Tensor:
    """mean_t sum_i f_i g_ti over the micro-batch (ReMoE, arXiv 2412.14711).

    f_i: E / target * the share of the tokens that chose expert i, without gradient; 1 if an equal
        load has `target` choices per token. It pushes harder on experts with a high load.
    g_ti: the prob of expert i, not negative; 0 if it was not chosen.
    """
    num_experts = choices.scores_TE.shape[1]
    return num_experts / target * weighted_by_load(choices.probs_per_expert(), choices, tokens)


def l1(selection: ReLUSelection, context: LossContext) -> RoutingLoss:
    """The sum of the probs weighted by load, a mean over layers; the controller is its weight."""
    loss = partial(l1_loss, target=selection.moe_relu_target_experts)
    return RoutingLoss("l1_loss", 1 / context.num_moe_layers, loss, context.controller)


def rules(selection: ReLUSelection) -> Rules:
    return Rules(ReLU(), ReLU())


def controller(
    selection: ReLUSelection, num_experts: int, train_iters: int | None
) -> LossCoefficient:
    return LossCoefficient(
        selection.initial_coefficient(train_iters),
        selection.moe_relu_target_experts,
        selection.moe_relu_l1_coeff_multiplier,
    )


RELU = register(
    System(
        ReLUSelection,
        layer=RoutedLayer,
        rules=rules,
        own_losses=(l1,),
        controller=controller,
    )
)
