"""What every layer of experts is: a feed-forward layer in a Megatron-Core transformer layer.

Shape suffixes: S sequence, B batch (Megatron's order), D model width, E all experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from moe_parallel.experts.fp8_engine import Fp8Engine
from moe_parallel.experts.parameters import ExpertParameters
from moe_parallel.ops import Ops
from moe_parallel.parallel import Groups, sum_gradient_over
from moe_parallel.selection.capacity import Capacity
from moe_parallel.telemetry.statistics import LayerStatistics

#: Takes the input of a layer and its weighted loss on routing [], and returns that input. What it
#: returns may start the loss's backward pass: a pipeline stage has no loss of its own to add to.
AddLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Statistics(Protocol):
    """Whoever counts what the layers of a model choose."""

    def layer(self, layer_number: int) -> LayerStatistics:
        """The part of the layer of this number, counted from 1."""
        ...


@dataclass(frozen=True)
class LayerContext:
    """What a layer is given besides its configuration."""

    groups: Groups
    ops: Ops
    statistics: Statistics
    capacity: Capacity | None  # None: dropless
    num_moe_layers: int  # of the whole model
    fp8: Fp8Engine | None = None  # None: experts compute as all else does
    add_loss: AddLoss = MoEAuxLossAutoScaler.apply


class ExpertLayer(MegatronModule, ABC):
    """A feed-forward layer of experts. Subclasses say how a token comes to its experts."""

    experts: ExpertParameters  # made by the subclass

    def __init__(self, config: TransformerConfig, context: LayerContext) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None
        self.context = context
        self.num_experts: int = config.num_moe_experts
        self.layer_number = 0

    def set_layer_number(self, layer_number: int) -> None:
        """Called by Megatron-Core: the number in the whole model, counted from 1."""
        self.layer_number = layer_number

    @abstractmethod
    def forward(self, hidden_SBD: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[S, B, D] -> ([S, B, D], None); S is the sequence-parallel share where that is on."""

    def after_step(self) -> None:
        """Called once the weights have been updated. Collective over the ranks of the stage."""

    def expert_weights(self) -> Iterable[torch.Tensor]:
        """Weights stacked over experts [E, ...], of which a token meets those of its experts."""
        return self.experts.parameters()

    def scoring_weights(self) -> Iterable[torch.Tensor]:
        """Weights of single experts, stacked [E, ...], that compute before anything is chosen."""
        return ()

    @property
    def statistics(self) -> LayerStatistics:
        return self.context.statistics.layer(self.layer_number)

    @property
    def routes(self) -> bool:
        """Whether this forward pass counts as one: the first of a recomputation does not."""
        return self.training and torch.is_grad_enabled()

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
