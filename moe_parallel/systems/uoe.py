"""uoe: the K experts whose routing neurons have the largest norms (Union-of-Experts)."""

from __future__ import annotations

from moe_parallel.config import UoESelection
from moe_parallel.layers import Rules, System, UnionLayer
from moe_parallel.layers.bias import balancing_bias
from moe_parallel.layers.routing_losses import importance, load_balancing_of_topk
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.registry import register
from moe_parallel.systems.topk import same_rules


def rules(selection: UoESelection) -> Rules:
    return same_rules(selection, TopK(selection.moe_router_topk))


UOE = register(
    System(
        UoESelection,
        layer=UnionLayer,
        rules=rules,
        losses=(load_balancing_of_topk, importance),
        bias=balancing_bias,
    )
)
