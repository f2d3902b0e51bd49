"""The auxiliary losses that a system can have. A layer builds each from the system's options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from moe_parallel.config import Balancing, DynamicChoices, RoutedSelection
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens

Loss = Callable[[Choices, Tokens], torch.Tensor]


@dataclass(frozen=True)
class RoutingLoss:
    """An auxiliary loss on the routing of a micro-batch, and its coefficient."""

    name: str  # one of telemetry.statistics.LOSSES
    coefficient: float
    of: Loss


#: (options of a system, loads of the layer in its latest step, number of MoE layers of the whole
#: model). The loads are None if no option needs them (`Selection.uses_step_load`).
MakeLoss = Callable[[Any, StepLoad | None, int], RoutingLoss]


def load_balancing(selection: Balancing, load: StepLoad | None, num_moe_layers: int) -> RoutingLoss:
    """alpha * n * sum f_i P_i, over the scope that --moe-router-load-balancing-type selects."""
    scope = selection.moe_router_load_balancing_type
    loss: Loss = load_balancing_loss
    if scope == "seq_aux_loss":
        loss = sequence_load_balancing_loss
    elif scope == "global_aux_loss" and load is not None:
        loss = partial(_of_the_step_before, load)
    return RoutingLoss("load_balancing_loss", selection.moe_aux_loss_coeff, loss)


def load_balancing_of_topk(
    selection: Any, load: StepLoad | None, num_moe_layers: int
) -> RoutingLoss:
    """The same loss for a fixed K. --moe-aux-loss-per-choice divides alpha by MoE layers * K."""
    loss = load_balancing(selection, load, num_moe_layers)
    if not selection.moe_aux_loss_per_choice:
        return loss
    share = loss.coefficient / (num_moe_layers * selection.moe_router_topk)
    return RoutingLoss(loss.name, share, loss.of)


def importance(selection: Balancing, load: StepLoad | None, num_moe_layers: int) -> RoutingLoss:
    """(std / mean)^2, over the experts, of each expert's sum of probs."""
    return RoutingLoss("importance_loss", selection.moe_importance_loss_coeff, importance_loss)


def z(selection: RoutedSelection, load: StepLoad | None, num_moe_layers: int) -> RoutingLoss:
    """mean(logsumexp(router logits)^2)."""
    return RoutingLoss("z_loss", selection.moe_z_loss_coeff, z_loss)


def entropy(selection: DynamicChoices, load: StepLoad | None, num_moe_layers: int) -> RoutingLoss:
    """The mean entropy of the probabilities over all experts."""
    return RoutingLoss("entropy_loss", selection.moe_entropy_loss_coeff, entropy_loss)


def _of_the_step_before(load: StepLoad, choices: Choices, tokens: Tokens) -> torch.Tensor:
    """The loss with f of the previous global batch; 0 in the first step, which has none."""
    return global_load_balancing_loss(choices, tokens, load.share_E)
