"""Routing-Free MoE: an autonomous layer with a learned bias per expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from moe_parallel.config import RoutingFreeSelection
from moe_parallel.layers.autonomous import AutonomousLayer
from moe_parallel.layers.expert_layer import LayerConfig, LayerContext
from moe_parallel.layers.system import Rules, System
from moe_parallel.selection.choices import BiasedRule, Rule
from moe_parallel.selection.threshold import Threshold


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
