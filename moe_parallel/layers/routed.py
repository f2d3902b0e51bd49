"""The routed family: a router scores the experts, the experts compute what they are sent."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.balancing import load_balancing_loss, z_loss
from moe_parallel.config import TopKSelection
from moe_parallel.dispatch import Dispatched
from moe_parallel.experts.swiglu import SwiGLUExperts
from moe_parallel.layers.expert_layer import ExpertLayer, LayerContext
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.topk import topk_of_logits


class RoutedLayer(ExpertLayer):
    """Softmax top-K routing over SwiGLU experts: the classic MoE layer."""

    w_router_ED: torch.Tensor  # linear router, no bias
    experts: SwiGLUExperts

    def __init__(
        self,
        config: TransformerConfig,
        selection: TopKSelection,
        expert_width: int,
        context: LayerContext,
        **_: Any,
    ) -> None:
        super().__init__(config, context)
        self.selection = selection
        self.add_replicated_weight("w_router_ED", self.num_experts, config.hidden_size)
        self.experts = SwiGLUExperts(
            self.num_experts,
            config.hidden_size,
            expert_width,
            context.groups,
            context.ops,
            config.params_dtype,
        )

    def choose(self, x_TD: torch.Tensor) -> Choices:
        # In fp32: close logits decide who computes, and bf16 would round them to ties.
        logits_TE = F.linear(x_TD.float(), self.replicated(self.w_router_ED.float()))
        return topk_of_logits(logits_TE, self.selection.moe_router_topk)

    def auxiliary_loss(self, choices: Choices) -> torch.Tensor | None:
        losses = []
        if self.selection.moe_aux_loss_coeff:
            balance = load_balancing_loss(choices, self.context.groups.tp)
            losses.append(self.selection.moe_aux_loss_coeff * balance)
        if self.selection.moe_z_loss_coeff:
            size = z_loss(choices.scores_TE, self.context.groups.tp)
            losses.append(self.selection.moe_z_loss_coeff * size)
        return torch.stack(losses).sum() if losses else None

    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        return self.experts(rows.x_ND, rows.gates_N, rows.counts_L)
