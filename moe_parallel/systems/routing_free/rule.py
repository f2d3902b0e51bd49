"""routing_free: every expert whose norm, less a learned bias, exceeds a threshold (Liu et al.)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from moe_parallel.balancing.controller import LossCoefficient
from moe_parallel.balancing.losses import LossContext, RoutingLoss, weighted_by_load
from moe_parallel.layers import AutonomousLayer, Rules, System, register
from moe_parallel.layers.expert_layer import LayerConfig, LayerContext
from moe_parallel.selection.choices import BiasedRule, Choices, Rule
from moe_parallel.selection.rules import raw_value, softmax_of_chosen
from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems.routing_free import RoutingFreeSelection
from moe_parallel.systems.threshold.rule import Threshold


class RoutingFreeLayer(AutonomousLayer):
    """G_i = ||x W_down^i|| - b_i, and expert i computes if G_i > theta (arXiv 2604.00801).

    `b_E` is a parameter that starts at 0 and learns by G of the chosen experts. theta is fixed.
    """

    b_E: torch.Tensor

    def __init__(
        self,
        config: LayerConfig,
        selection: RoutingFreeSelection,
        expert_width: int,
        context: LayerContext,
        system: System,
        **_: Any,  # what later versions of Megatron-Core add
    ) -> None:
        theta = selection.theta(config.hidden_size, config.init_method_std)

        def above_theta(selection: RoutingFreeSelection) -> Rules:
            given = (cast(Threshold, rule) for rule in system.rules(selection))
            return Rules(*(replace(rule, level=theta) for rule in given))

        with_theta = replace(system, rules=above_theta)
        super().__init__(config, selection, expert_width, context, with_theta)
        self.theta = theta
        self.add_replicated_weight("b_E", self.num_experts)
        self.b_E.init_std = 0.0  # type: ignore[attr-defined]

    def current_rule(self) -> Rule:
        rule = cast(BiasedRule, super().current_rule())
        b_E = self.replicated(self.b_E)
        return rule.with_bias(-b_E.to(torch.promote_types(b_E.dtype, torch.float32)))

    def cutoffs(self) -> torch.Tensor:
        return self.theta + self.b_E.detach().float()


def routing_free_loss(choices: Choices, tokens: Tokens, expert_share: float) -> torch.Tensor:
    """mu L_EB + (1 - mu) L_TB over the micro-batch (Routing-Free MoE, arXiv 2604.00801).

    L_EB = mean_i (mean_t f_ti) (mean_t G_ti) and L_TB = mean_t (mean_i f_ti) (mean_i G_ti), with
        f_ti: 1 if token t chose expert i, without gradient; G_ti: the value then, and 0 otherwise.
    `expert_share`: mu.
    """
    assert choices.values_TE is not None
    num_tokens, num_experts = choices.scores_TE.shape
    f_TE = choices.chosen()
    g_TE = choices.values_TE * f_TE
    experts = weighted_by_load(g_TE.sum(dim=0), choices, tokens) / num_experts
    both = tokens.sum((f_TE.mean(dim=1) * g_TE.mean(dim=1)).sum())
    return expert_share * experts + (1 - expert_share) * both / (num_tokens * tokens.num_shares)


def routing_free(selection: RoutingFreeSelection, context: LossContext) -> RoutingLoss:
    """Routing-Free MoE's loss, a mean over layers; the controller is its weight."""
    loss = partial(routing_free_loss, expert_share=selection.routing_free_expert_share)
    share = 1 / context.num_moe_layers
    # Its gradient passes through the scores of the chosen experts alone.
    return RoutingLoss("routing_free_loss", share, loss, context.controller, through_all=False)


_PROBS = {"norm": raw_value, "softmax": softmax_of_chosen}


def rules(selection: RoutingFreeSelection) -> Rules:
    """The rules, before the layer gives them its threshold."""
    rule = Threshold(_PROBS[selection.routing_free_gate])
    return Rules(rule, rule)


def controller(
    selection: RoutingFreeSelection, num_experts: int, train_iters: int | None
) -> LossCoefficient:
    return LossCoefficient(
        selection.initial_coefficient(train_iters),
        selection.routing_free_target_experts,
        selection.routing_free_coeff_multiplier,
        most=1.0,
    )


ROUTING_FREE = register(
    System(
        RoutingFreeSelection,
        layer=RoutingFreeLayer,
        rules=rules,
        own_losses=(routing_free,),
        controller=controller,
    )
)
