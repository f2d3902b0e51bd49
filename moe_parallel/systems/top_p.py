"""top_p, aoe_top_p: the most probable experts, until their probabilities sum to p."""

from __future__ import annotations

from moe_parallel.balancing.top_p_controller import TopPController
from moe_parallel.config import AoETopPSelection, DynamicChoices, TopPSelection
from moe_parallel.layers import AutonomousLayer, RoutedLayer, Rules, System
from moe_parallel.layers.routing_losses import coupling, entropy, importance, load_balancing, z
from moe_parallel.layers.system import SCALED_OUTPUT
from moe_parallel.selection.top_p import MovingTopP, TopP
from moe_parallel.systems.registry import register


def rules(selection: DynamicChoices) -> Rules:
    """The rules; evaluation may have its own p and a maximum number of experts per token."""
    p, strict = selection.moe_top_p, selection.moe_top_p_strict
    most = selection.moe_inference_max_experts
    trained = TopP if selection.moe_top_p_target_experts is None else MovingTopP
    evaluated, its_p = trained, p
    if selection.moe_inference_top_p is not None:
        evaluated, its_p = TopP, selection.moe_inference_top_p
    renormalizes = selection.moe_top_p_renormalize
    return Rules(
        trained(p, strict, renormalizes=renormalizes),
        evaluated(its_p, strict, most, renormalizes),
    )


def upcycling(selection: DynamicChoices) -> str | None:
    return None if selection.moe_top_p_renormalize else SCALED_OUTPUT


def controller(
    selection: DynamicChoices, num_experts: int, train_iters: int | None
) -> TopPController | None:
    if selection.moe_top_p_target_experts is None:
        return None
    return TopPController(
        selection.moe_top_p,
        selection.moe_top_p_target_experts,
        num_experts,
        selection.moe_top_p_proportional_gain,
        selection.moe_top_p_integral_gain,
    )


TOP_P = register(
    System(
        TopPSelection,
        layer=RoutedLayer,
        rules=rules,
        losses=(load_balancing, importance, z, entropy, coupling),
        controller=controller,
        upcycling=upcycling,
    )
)
AOE_TOP_P = register(
    System(
        AoETopPSelection,
        layer=AutonomousLayer,
        rules=rules,
        losses=(load_balancing, importance, entropy),
        controller=controller,
        upcycling=upcycling,
    )
)
