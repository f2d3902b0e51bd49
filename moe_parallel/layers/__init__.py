"""Layers of experts in three families: routed, autonomous, and merged.

The first two dispatch tokens to experts; a merged layer dispatches nothing.
"""

from moe_parallel.layers.autonomous import AutonomousLayer
from moe_parallel.layers.dispatched import DispatchedLayer
from moe_parallel.layers.expert_layer import ExpertLayer, LayerConfig, LayerContext
from moe_parallel.layers.merged import LoryLayer, MergedLayer, SmearLayer
from moe_parallel.layers.routed import FactorizedRoutedLayer, RoutedLayer
from moe_parallel.layers.routing_free import RoutingFreeLayer
from moe_parallel.layers.system import Rules, System
from moe_parallel.layers.union import UnionLayer

__all__ = [
    "AutonomousLayer",
    "DispatchedLayer",
    "ExpertLayer",
    "FactorizedRoutedLayer",
    "LayerConfig",
    "LayerContext",
    "LoryLayer",
    "MergedLayer",
    "RoutedLayer",
    "RoutingFreeLayer",
    "Rules",
    "SmearLayer",
    "System",
    "UnionLayer",
]
