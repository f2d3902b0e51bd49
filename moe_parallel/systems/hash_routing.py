"""hash: the id of a token selects its experts, by a frozen table. It is a control."""

from __future__ import annotations

from moe_parallel.config import HashSelection
from moe_parallel.layers import RoutedLayer, Rules, System
from moe_parallel.layers.routing_losses import coupling, z
from moe_parallel.layers.system import SCALED_OUTPUT
from moe_parallel.selection import topk
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.registry import register


def rules(selection: HashSelection) -> Rules:
    """The rule that weights the experts; the layer's table chooses them."""
    k = selection.moe_router_topk
    rule = TopK(k, topk.raw_probability if k == 1 else topk.softmax_of_selected)
    return Rules(rule, rule)


def upcycling(selection: HashSelection) -> str | None:
    return SCALED_OUTPUT if selection.moe_router_topk == 1 else None


HASH = register(
    System(
        HashSelection,
        layer=RoutedLayer,
        rules=rules,
        losses=(z, coupling),
        upcycling=upcycling,
    )
)
