"""aoe: the K experts with the largest norm ||x W_down|| (Autonomy-of-Experts, Algorithm 2)."""

from __future__ import annotations

from moe_parallel.layers import AutonomousLayer, Rules, System, register
from moe_parallel.layers.system import FREE_OUTPUT, SCALED_OUTPUT
from moe_parallel.selection.rules import raw_probability, softmax_of_selected
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.aoe import AoESelection
from moe_parallel.systems.topk.rule import beside_free, same_rules


def rules(selection: AoESelection) -> Rules:
    probs = raw_probability if selection.probs_over_all else softmax_of_selected
    return same_rules(selection, TopK(selection.moe_router_topk, beside_free(selection, probs)))


def upcycling(selection: AoESelection) -> str | None:
    if selection.free_experts:
        return FREE_OUTPUT
    return SCALED_OUTPUT if selection.probs_over_all else None


AOE = register(
    System(
        AoESelection,
        layer=AutonomousLayer,
        rules=rules,
        upcycling=upcycling,
    )
)
