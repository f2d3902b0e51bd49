"""Which losses on routing a system asks for, made once from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from moe_parallel.balancing.load import StepLoad
from moe_parallel.balancing.losses import (
    entropy_loss,
    global_load_balancing_loss,
    importance_loss,
    load_balancing_loss,
    sequence_load_balancing_loss,
    z_loss,
)
from moe_parallel.config import (
    Balancing,
    BiasBalancing,
    DispatchedSelection,
    DynamicChoices,
    FixedChoices,
    RoutedSelection,
)
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens

Loss = Callable[[Choices, Tokens], torch.Tensor]


@dataclass(frozen=True)
class RoutingLoss:
    """A loss on the routing of a micro-batch and its weight."""

    name: str  # one of telemetry.statistics.LOSSES
    coefficient: float
    of: Loss


def routing_losses(
    selection: DispatchedSelection, load: StepLoad | None, num_moe_layers: int
) -> list[RoutingLoss]:
    """The losses whose weight is not 0.

    Args:
        load: the loads of the layer's latest step; needed where `needs_step_load`.
        num_moe_layers: of the whole model.
    """
    losses = []
    if isinstance(selection, Balancing):
        kind = _load_balancing(selection.moe_router_load_balancing_type, load)
        coefficient = selection.moe_aux_loss_coeff
        if isinstance(selection, FixedChoices) and selection.moe_aux_loss_per_choice:
            coefficient /= num_moe_layers * selection.moe_router_topk
        losses.append(RoutingLoss("load_balancing_loss", coefficient, kind))
        weight = selection.moe_importance_loss_coeff
        losses.append(RoutingLoss("importance_loss", weight, importance_loss))
    if isinstance(selection, RoutedSelection):
        losses.append(RoutingLoss("z_loss", selection.moe_z_loss_coeff, z_loss))
    if isinstance(selection, DynamicChoices):
        losses.append(RoutingLoss("entropy_loss", selection.moe_entropy_loss_coeff, entropy_loss))
    return [loss for loss in losses if loss.coefficient]


def needs_step_load(selection: DispatchedSelection) -> bool:
    """Whether routing depends on the loads of the step before."""
    by_bias = isinstance(selection, BiasBalancing) and selection.moe_router_enable_expert_bias
    by_loss = (
        isinstance(selection, Balancing)
        and selection.moe_router_load_balancing_type == "global_aux_loss"
        and selection.moe_aux_loss_coeff != 0
    )
    return by_bias or by_loss


def _load_balancing(scope: str, load: StepLoad | None) -> Loss:
    if scope == "global_aux_loss" and load is not None:
        return partial(_of_the_step_before, load)
    return {"seq_aux_loss": sequence_load_balancing_loss}.get(scope, load_balancing_loss)


def _of_the_step_before(load: StepLoad, choices: Choices, tokens: Tokens) -> torch.Tensor:
    """With f of the whole global batch before; 0 in the first step, which has none before it."""
    return global_load_balancing_loss(choices, tokens, load.share_E)
