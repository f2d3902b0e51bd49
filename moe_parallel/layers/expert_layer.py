"""The base class of all layers of experts: a feed-forward layer of a Megatron-Core transformer.

The library uses these layers without Megatron-Core. So they, and what they use, import it where a
run of several processes calls it, and not when they are imported.

Shape suffixes: S sequence, B batch (Megatron's order), D model width, E all experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from moe_parallel.experts.experts import ExpertParameters, ShardedModule
from moe_parallel.experts.fp8 import Fp8Engine
from moe_parallel.layers.given_choices import Forcing, RouterTrace
from moe_parallel.ops import Ops
from moe_parallel.parallel import Groups, sum_gradient_over
from moe_parallel.selection.capacity import Capacity
from moe_parallel.telemetry.progress import Progress

#: Takes the input of a layer and the layer's weighted auxiliary loss, a scalar, and returns the
#: input. In a run, the backward pass of the returned tensor also starts that of the loss, because a
#: pipeline stage has no loss of its own to which this one could be added. The library keeps the
#: loss instead, as `aux_loss`.
AddLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_backward_pass(x_TD: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """The AddLoss of a run: Megatron-Core's, whose schedules scale the loss."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    return MoEAuxLossAutoScaler.apply(x_TD, loss)


def at_start() -> int:
    """The iteration of a layer that no run trains."""
    return 0


class Recipient(Protocol):
    """Takes the statistics of a forward pass: some of the methods of `RoutingTotals`."""

    def add(self, *counts: Any, **others: Any) -> None: ...

    def add_loss(self, *loss: Any, **others: Any) -> None: ...

    def add_merges(self, *merges: Any, **others: Any) -> None: ...


class Statistics(Protocol):
    """Collects the statistics of the choices in the layers of a model."""

    def recipient(self) -> Recipient | None:
        """What counts the forward pass under way; None: it is not counted."""
        ...


@dataclass(frozen=True)
class LayerConfig:
    """What a layer reads of its configuration. In a run that is Megatron-Core's TransformerConfig,
    which has these fields, too."""

    hidden_size: int
    num_moe_experts: int
    init_method_std: float
    params_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    recompute_granularity: str | None = None


@dataclass(frozen=True)
class LayerContext:
    """The arguments of a layer besides its configuration."""

    groups: Groups
    ops: Ops
    statistics: Statistics
    capacity: Capacity | None  # None: dropless
    num_moe_layers: int  # of the whole model
    fp8: Fp8Engine | None = None  # None: experts compute in the dtype of the model
    add_loss: AddLoss = in_backward_pass
    progress: Progress = field(default_factory=Progress)  # of this rank
    forcing: Forcing | None = None  # None: the scores choose the experts
    trace: RouterTrace = field(default_factory=RouterTrace)  # what is recorded or replayed
    iteration: Callable[[], int] = at_start  # optimizer steps so far
    hash_table_VK: torch.Tensor | None = None  # the experts of each token id in a new model
    seed: int = 0  # of random numbers that do not depend on the rank
    train_iters: int | None = None  # of the run; None: no run trains the layer
    dispatch_parts: int = 1  # of the experts of a rank, whose rows are sent by themselves
    recomputes_layers: bool = False  # each keeps only its input, besides full recomputation
    recomputes_shared: bool = False  # the same for shared experts alone


class ExpertLayer(ShardedModule, ABC):
    """A feed-forward layer of experts. A subclass defines how the experts compute the tokens."""

    experts: ExpertParameters  # set by the subclass
    #: The ids of the tokens of this forward pass, int64 [B, S], if the system reads them. With
    #: context parallelism, those of this rank's share of every sequence.
    token_ids_BS: torch.Tensor | None = None

    def __init__(self, config: LayerConfig, context: LayerContext) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.num_experts = config.num_moe_experts
        self.layer_number = 0

    @classmethod
    def variant(cls, selection: Any) -> type[ExpertLayer]:
        """The class for these options of a system: this one, or a subclass."""
        return cls

    def set_layer_number(self, layer_number: int) -> None:
        """Megatron-Core calls this with the layer's number in the whole model, from 1."""
        self.layer_number = layer_number

    def forward(self, hidden_SBD: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[S, B, D] -> ([S, B, D], None); with sequence parallelism, S is this rank's share."""
        if self.context.recomputes_layers and torch.is_grad_enabled():
            from megatron.core.tensor_parallel import checkpoint

            # The ids are an argument, because other tokens may pass before this is recomputed.
            y_SBD: torch.Tensor = checkpoint(self._of_ids, False, hidden_SBD, self.token_ids_BS)
            return y_SBD, None
        return self.output(hidden_SBD), None

    def _of_ids(self, hidden_SBD: torch.Tensor, token_ids_BS: torch.Tensor | None) -> torch.Tensor:
        self.token_ids_BS = token_ids_BS
        return self.output(hidden_SBD)

    @abstractmethod
    def output(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        """[S, B, D] -> [S, B, D]. With recomputation it runs twice, first without gradients."""

    def after_step(self) -> None:
        """Called after each update of the weights. Collective over the ranks of the stage."""

    def expert_weights(self) -> Iterable[torch.Tensor]:
        """Weights that are stacked over experts; a token uses only those of its experts."""
        return self.experts.parameters()

    def scoring_weights(self) -> Iterable[torch.Tensor]:
        """Weights of experts, stacked as [E, ...], that compute the scores before the selection."""
        return ()

    @property
    def routes(self) -> bool:
        """Whether this forward pass counts; the first pass of a recomputation does not."""
        return self.training and torch.is_grad_enabled()

    def replicated(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight that every tensor-parallel rank holds completely and uses on its own tokens.

        Its gradient is the sum over those ranks. With sequence parallelism, Megatron-Core sums it
        at the end of the step (attribute `sequence_parallel`); otherwise it is summed here.
        """
        if self.config.sequence_parallel or self.context.groups.tp.size() == 1:
            return weight
        return sum_gradient_over(weight, self.context.groups.tp)

    def add_replicated_weight(self, name: str, *shape: int) -> None:
        """Register a weight that every rank of the stage holds completely (a router, W_down)."""
        weight = nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))
        weight.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        self.register_parameter(name, weight)
