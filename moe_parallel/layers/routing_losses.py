"""The auxiliary losses that a system can have. A layer builds each from the system's options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from moe_parallel.balancing.controller import Controller
from moe_parallel.balancing.load import StepLoad
from moe_parallel.balancing.losses import (
    entropy_loss,
    global_load_balancing_loss,
    importance_loss,
    l1_loss,
    load_balancing_loss,
    routing_free_loss,
    sequence_load_balancing_loss,
    z_loss,
)
from moe_parallel.config import (
    Balancing,
    DynamicChoices,
    FreeExperts,
    ReLUSelection,
    RoutedSelection,
    RoutingFreeSelection,
)
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.telemetry.metrics import loss_names, register_loss

LossOfChoices = Callable[[Choices, Tokens], torch.Tensor]


@dataclass(frozen=True)
class RoutingLoss:
    """An auxiliary loss on the routing of a micro-batch, and its coefficient.

    With a controller, its setting multiplies the coefficient.
    """

    name: str  # in metrics.jsonl
    coefficient: float
    of: LossOfChoices
    controller: Controller | None = None
    through_all: bool = True  # whether scores of experts that are not chosen have a gradient

    def __post_init__(self) -> None:
        if self.name not in loss_names():
            raise ValueError(
                f"no auxiliary loss is called {self.name!r}: call {register_loss.__module__}."
                f"register_loss({self.name!r}) where the system is registered"
            )

    def weighted(self, value: torch.Tensor) -> torch.Tensor:
        """The part of the total loss that a value of this loss adds."""
        part = self.coefficient * value
        return part if self.controller is None else self.controller.setting * part


class LossContext(NamedTuple):
    """What a loss may use besides the options of its system."""

    num_moe_layers: int  # of the whole model
    load: StepLoad | None = None  # of the latest step; None: see `Selection.uses_step_load`
    controller: Controller | None = None  # None: see `Selection.controlled`
    layer: Any = None  # the layer that will compute the loss; its weights exist by then


#: Takes the options of a system.
MakeLoss = Callable[[Any, LossContext], RoutingLoss]


def load_balancing(selection: Balancing, context: LossContext) -> RoutingLoss:
    """alpha * n * sum f_i P_i, over the scope that --moe-router-load-balancing-type selects.

    With free experts it is alpha * (n + Z) * sum eta_i f_i P_i, with eta_i = tau for those.
    """
    scope = selection.moe_router_load_balancing_type
    loss: LossOfChoices = load_balancing_loss
    if scope == "seq_aux_loss":
        loss = sequence_load_balancing_loss
    elif scope == "global_aux_loss" and context.load is not None:
        loss = partial(_of_the_step_before, context.load)
    if isinstance(selection, FreeExperts) and selection.free_experts:
        loss = partial(_weighing_free, loss, selection.free_experts, selection.moe_free_expert_tau)
    return RoutingLoss("load_balancing_loss", selection.moe_aux_loss_coeff, loss)


def load_balancing_of_topk(selection: Any, context: LossContext) -> RoutingLoss:
    """The same loss for a fixed K. --moe-aux-loss-per-choice divides alpha by MoE layers * K."""
    loss = load_balancing(selection, context)
    if not selection.moe_aux_loss_per_choice:
        return loss
    share = loss.coefficient / (context.num_moe_layers * selection.moe_router_topk)
    return RoutingLoss(loss.name, share, loss.of)


def importance(selection: Balancing, context: LossContext) -> RoutingLoss:
    """(std / mean)^2, over the experts, of each expert's sum of probs."""
    return RoutingLoss("importance_loss", selection.moe_importance_loss_coeff, importance_loss)


def z(selection: RoutedSelection, context: LossContext) -> RoutingLoss:
    """mean(logsumexp(router logits)^2)."""
    return RoutingLoss("z_loss", selection.moe_z_loss_coeff, z_loss)


def coupling(selection: RoutedSelection, context: LossContext) -> RoutingLoss:
    """ERC: couples router and experts. It is a loss on the weights, whatever the tokens are."""
    groups = context.layer.context.groups
    # A loss on tokens leaves a part of its gradient on each rank of a micro-batch, tp x cp, and
    # Megatron-Core adds up the parts. This one leaves a part on each rank of etp x ep.
    share = groups.etp_ep.size() / groups.tp_cp.size()
    coefficient = share * selection.moe_erc_loss_coeff
    return RoutingLoss("erc_loss", coefficient, context.layer.coupling_loss)


def entropy(selection: DynamicChoices, context: LossContext) -> RoutingLoss:
    """The mean entropy of the probabilities over all experts."""
    return RoutingLoss("entropy_loss", selection.moe_entropy_loss_coeff, entropy_loss)


def l1(selection: ReLUSelection, context: LossContext) -> RoutingLoss:
    """The sum of the probs weighted by load, a mean over layers; the controller is its weight."""
    loss = partial(l1_loss, target=selection.moe_relu_target_experts)
    return RoutingLoss("l1_loss", 1 / context.num_moe_layers, loss, context.controller)


def routing_free(selection: RoutingFreeSelection, context: LossContext) -> RoutingLoss:
    """Routing-Free MoE's loss, a mean over layers; the controller is its weight."""
    loss = partial(routing_free_loss, expert_share=selection.routing_free_expert_share)
    share = 1 / context.num_moe_layers
    # Its gradient passes through the scores of the chosen experts alone.
    return RoutingLoss("routing_free_loss", share, loss, context.controller, through_all=False)


def _of_the_step_before(load: StepLoad, choices: Choices, tokens: Tokens) -> torch.Tensor:
    """The loss with f of the previous global batch; 0 in the first step, which has none."""
    return global_load_balancing_loss(choices, tokens, load.share_E)


def _weighing_free(
    loss: LossOfChoices, num_free: int, tau: float, choices: Choices, tokens: Tokens
) -> torch.Tensor:
    """A load-balancing loss whose terms of the free experts count tau (MoE++).

    At its balance, eta_i f_i is equal for all i. MoE++ leaves out the factor n + Z.
    """
    eta_E = torch.ones_like(choices.probabilities_TE[0])
    eta_E[-num_free:] = tau
    return loss(replace(choices, probabilities_TE=choices.probabilities_TE * eta_E), tokens)
