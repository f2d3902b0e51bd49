"""What every MoE layer that dispatches tokens does; its subclasses say who decides.

    tokens -> choose -> capacity -> dispatch -> experts -> combine

Shape suffixes: S sequence, B batch (Megatron's order), T tokens of this rank = S * B over the
tensor-parallel ranks, K choices per token, E all experts, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from moe_parallel.dispatch import Dispatched, build_dispatcher
from moe_parallel.experts.parameters import ExpertParameters
from moe_parallel.ops import Ops
from moe_parallel.parallel import Groups, sum_gradient_over
from moe_parallel.selection.capacity import Capacity
from moe_parallel.selection.choices import Choices
from moe_parallel.telemetry.statistics import RoutingStatistics


@dataclass(frozen=True)
class LayerContext:
    """What a layer is given besides its configuration."""

    groups: Groups
    ops: Ops
    statistics: RoutingStatistics
    capacity: Capacity | None  # None: dropless


class ExpertLayer(MegatronModule, ABC):
    """A feed-forward layer of experts in a Megatron-Core transformer layer.

    Inside, the tokens of a micro-batch are always split over the tensor-parallel ranks: by
    sequence parallelism where it is on, by this layer where it is not. Capacity therefore counts
    over the S * B / tp tokens that a rank routes.
    """

    experts: ExpertParameters  # made by the subclass

    def __init__(self, config: TransformerConfig, context: LayerContext) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None
        self.context = context
        self.num_experts: int = config.num_moe_experts
        self.dispatcher = build_dispatcher(self.num_experts, context.groups, context.ops)
        self.layer_number = 0

    def set_layer_number(self, layer_number: int) -> None:
        """Called by Megatron-Core: the number in the whole model, counted from 1."""
        self.layer_number = layer_number

    @abstractmethod
    def choose(self, x_TD: torch.Tensor) -> Choices:
        """Who computes each token."""

    @abstractmethod
    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        """The gated outputs of this rank's experts: [N, D]."""

    @abstractmethod
    def auxiliary_loss(self, choices: Choices) -> torch.Tensor | None:
        """The weighted losses on routing of this micro-batch, fp32 0-d; None: there are none."""

    def forward(self, hidden_SBD: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[S, B, D] -> ([S, B, D], None); S is the sequence-parallel share where that is on."""
        split_here = self.context.groups.tp.size() > 1 and not self.config.sequence_parallel
        if split_here:
            hidden_SBD = scatter_to_sequence_parallel_region(
                hidden_SBD, group=self.context.groups.tp
            )
        y_SBD = self._compute_tokens(hidden_SBD.flatten(0, 1)).view_as(hidden_SBD)
        if split_here:
            y_SBD = gather_from_sequence_parallel_region(
                y_SBD, tensor_parallel_output_grad=False, group=self.context.groups.tp
            )
        return y_SBD, None

    def _compute_tokens(self, x_TD: torch.Tensor) -> torch.Tensor:
        choices = self.choose(x_TD)
        if self.training and torch.is_grad_enabled():
            loss = self.auxiliary_loss(choices)
            if loss is not None:
                # A pipeline stage has no loss of its own to add to: the gradient enters here.
                x_TD = MoEAuxLossAutoScaler.apply(x_TD, loss)
        kept, rows_per_expert = self._limit(choices)
        self._record(choices, kept)
        rows = self.dispatcher.dispatch(x_TD, kept.experts_TK, kept.gates_TK, rows_per_expert)
        return self.dispatcher.combine(self.compute(rows), rows.route)

    def _limit(self, choices: Choices) -> tuple[Choices, int | None]:
        """The choices that fit, and how many rows to pad every expert to."""
        capacity = self.context.capacity
        if capacity is None:
            return choices, None
        tokens, k = choices.experts_TK.shape
        rows = capacity.rows_per_expert(tokens, k, self.num_experts) if capacity.pad else None
        return capacity.keep(choices), rows

    def _record(self, choices: Choices, kept: Choices) -> None:
        dropped = (choices.experts_TK >= 0).sum() - (kept.experts_TK >= 0).sum()
        self.context.statistics.layer(self.layer_number).record(
            tokens_per_expert_E=choices.tokens_per_expert(),
            dropped=dropped,
            scores_TE=choices.scores_TE.detach(),
            norms_TE=self.norms(choices),
        )

    def scoring_weights(self) -> list[torch.Tensor]:
        """Weights of single experts, stacked [E, ...], that compute before anything is chosen."""
        return []

    def norms(self, choices: Choices) -> torch.Tensor | None:
        """The norms to log, where scores are norms."""
        return None

    def replicated(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight that every tensor-parallel rank holds whole and uses on tokens of its own.

        Its gradient is the sum over those ranks: taken by Megatron-Core at the end of the step
        where sequence parallelism is on (attribute `sequence_parallel`), here where it is not.
        """
        if self.config.sequence_parallel:
            return weight
        return sum_gradient_over(weight, self.context.groups.tp)

    def add_replicated_weight(self, name: str, *shape: int) -> None:
        """Register a weight that every rank of the stage holds whole (a router, W_down)."""
        weight = nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))
        weight.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        self.register_parameter(name, weight)
