"""top_p, aoe_top_p: the most probable experts, until their probabilities sum to p."""

from __future__ import annotations

from moe_parallel.config import AoETopPSelection, DynamicChoices, TopPSelection
from moe_parallel.layers import AutonomousLayer, RoutedLayer, Rules, System
from moe_parallel.layers.routing_losses import entropy, importance, load_balancing, z
from moe_parallel.selection.top_p import TopP
from moe_parallel.systems.registry import register


def rules(selection: DynamicChoices) -> Rules:
    """The rules; evaluation may have its own p and a maximum number of experts per token."""
    strict = selection.moe_top_p_strict
    p = selection.moe_inference_top_p or selection.moe_top_p
    return Rules(
        TopP(selection.moe_top_p, strict), TopP(p, strict, selection.moe_inference_max_experts)
    )


TOP_P = register(
    System(
        TopPSelection,
        layer=RoutedLayer,
        rules=rules,
        losses=(load_balancing, importance, z, entropy),
    )
)
AOE_TOP_P = register(
    System(
        AoETopPSelection,
        layer=AutonomousLayer,
        rules=rules,
        losses=(load_balancing, importance, entropy),
    )
)
