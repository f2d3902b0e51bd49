"""The autonomous family: experts rank themselves by the norm of their own activations (AoE)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.balancing import load_balancing_loss
from moe_parallel.config import AoESelection
from moe_parallel.dispatch import Dispatched
from moe_parallel.experts.low_rank import LowRankExperts
from moe_parallel.layers.expert_layer import ExpertLayer, LayerContext
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.topk import gates_of_norms


class AutonomousLayer(ExpertLayer):
    """Autonomy-of-Experts with top-K of norms (AoE paper, Algorithm 2).

    C_i = x W_down^i for all E experts; p_i = ||C_i||_2; the K experts of greatest p compute, and
    softmax over their p weighs their outputs. There is no router. W_down of every expert is held
    by every rank, since each token needs all norms before it travels; its gradient has two parts,
    from the norms at the token's rank and from the computation at the expert's, and Megatron-Core's
    reduction over the ranks of a stage adds them.
    """

    w_down_EDR: torch.Tensor
    experts: LowRankExperts

    def __init__(
        self,
        config: TransformerConfig,
        selection: AoESelection,
        expert_width: int,
        context: LayerContext,
        **_: Any,
    ) -> None:
        super().__init__(config, context)
        self.selection = selection
        rank = selection.aoe_low_rank_size
        self.add_replicated_weight("w_down_EDR", self.num_experts, config.hidden_size, rank)
        self.experts = LowRankExperts(
            self.num_experts,
            config.hidden_size,
            rank,
            expert_width,
            context.groups,
            context.ops,
            config.params_dtype,
        )

    def choose(self, x_TD: torch.Tensor) -> Choices:
        norms_TE, experts_TK = self.context.ops.norm_topk(
            x_TD, self.replicated(self.w_down_EDR), self.selection.moe_router_topk
        )
        return gates_of_norms(norms_TE, experts_TK)

    def auxiliary_loss(self, choices: Choices) -> torch.Tensor | None:
        if not self.selection.moe_aux_loss_coeff:
            return None
        balance = load_balancing_loss(choices, self.context.groups.tp)
        return self.selection.moe_aux_loss_coeff * balance

    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        w_down_LDR = self.experts.local(self.replicated(self.w_down_EDR))
        return self.experts(rows.x_ND, rows.gates_N, rows.counts_L, w_down_LDR)

    def scoring_weights(self) -> list[torch.Tensor]:
        return [self.w_down_EDR]

    def norms(self, choices: Choices) -> torch.Tensor:
        return choices.scores_TE.detach()
