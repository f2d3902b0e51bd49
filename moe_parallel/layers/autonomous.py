"""The autonomous family: experts rank themselves by the norm of their own activations (AoE)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.config import AutonomousSelection
from moe_parallel.dispatch import Dispatched
from moe_parallel.experts.low_rank import LowRankExperts
from moe_parallel.layers.dispatched import DispatchedLayer
from moe_parallel.layers.expert_layer import LayerContext
from moe_parallel.layers.selected_norms import norms_of_selected
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK


class AutonomousLayer(DispatchedLayer):
    """Autonomy-of-Experts (AoE paper, Algorithm 2), with any rule on the norms.

    C_i = x W_down^i for all E experts; p_i = ||C_i||_2; with top-K, the K experts of greatest p
    compute, and softmax over their p weighs their outputs. There is no router. W_down of every
    expert is held by every rank, since each token needs all norms before it travels; its gradient
    has two parts, from the norms at the token's rank and from the computation at the expert's, and
    Megatron-Core's reduction over the ranks of a stage adds them.
    """

    w_down_EDR: torch.Tensor
    experts: LowRankExperts

    def __init__(
        self,
        config: TransformerConfig,
        selection: AutonomousSelection,
        expert_width: int,
        context: LayerContext,
        **_: Any,
    ) -> None:
        super().__init__(config, selection, context)
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

    def choose(self, x_TD: torch.Tensor, tokens: Tokens) -> Choices:
        return self._by_rule(*self._score(x_TD), tokens)

    def _score(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms fp32 [T, E], and the experts of the greatest K, as the kernel finds them."""
        rule = self.current_rule()
        k = rule.k if isinstance(rule, TopK) else 1
        return self.context.ops.norm_topk(x_TD, self.replicated(self.w_down_EDR), k)

    def _by_rule(
        self, norms_TE: torch.Tensor, greatest_TK: torch.Tensor, tokens: Tokens
    ) -> Choices:
        rule = self.current_rule()
        if isinstance(rule, TopK) and rule.bias_E is None:
            return rule.of(norms_TE, greatest_TK)
        return rule(norms_TE, tokens)

    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        w_down_LDR = self.experts.local(self.replicated(self.w_down_EDR))
        return self.experts(rows.x_ND, rows.gates_N, rows.counts_L, w_down_LDR)

    def scoring_weights(self) -> Iterable[torch.Tensor]:
        return [self.w_down_EDR]

    def norms(self, choices: Choices) -> torch.Tensor:
        return choices.scores_TE.detach()


class SelectedGradientLayer(AutonomousLayer):
    """The same, where scores learn through the norms of the chosen experts alone.

    With softmax over the selected norms and no loss on routing, the others have no gradient, so
    nothing is lost, and the backward pass of their E - K products with x is spared.
    """

    def choose(self, x_TD: torch.Tensor, tokens: Tokens) -> Choices:
        with torch.no_grad():
            norms_TE, greatest_TK = self._score(x_TD)
            chosen_TK = self._by_rule(norms_TE, greatest_TK, tokens).experts_TK
        w_down_EDR = self.replicated(self.w_down_EDR)
        norms_TE = norms_of_selected(x_TD, w_down_EDR, norms_TE, chosen_TK, self.context.ops)
        return self._by_rule(norms_TE, greatest_TK, tokens)
