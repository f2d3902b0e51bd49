"""routing_free: every expert whose norm, less a learned bias, exceeds a threshold (Liu et al.)."""

from __future__ import annotations

from moe_parallel.balancing.controller import LossCoefficient
from moe_parallel.config import RoutingFreeSelection
from moe_parallel.layers import RoutingFreeLayer, Rules, System
from moe_parallel.layers.routing_losses import routing_free
from moe_parallel.selection import threshold
from moe_parallel.selection.threshold import Threshold
from moe_parallel.systems.registry import register

_PROBS = {"norm": threshold.raw_value, "softmax": threshold.softmax_of_chosen}


def rules(selection: RoutingFreeSelection) -> Rules:
    """The rules, before the layer gives them its threshold."""
    rule = Threshold(_PROBS[selection.routing_free_gate])
    return Rules(rule, rule)


def controller(
    selection: RoutingFreeSelection, num_experts: int, train_iters: int | None
) -> LossCoefficient:
    return LossCoefficient(
        selection.initial_coefficient(train_iters),
        selection.routing_free_target_experts,
        selection.routing_free_coeff_multiplier,
        most=1.0,
    )


ROUTING_FREE = register(
    System(
        RoutingFreeSelection,
        layer=RoutingFreeLayer,
        rules=rules,
        losses=(routing_free,),
        controller=controller,
    )
)
