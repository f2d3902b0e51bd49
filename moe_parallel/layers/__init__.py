"""Layers of experts in three families: routed, autonomous, and merged.

The first two dispatch tokens to experts; a merged layer dispatches nothing. A system is a record
(`System`) of which layer, rules and losses its options select.
"""

from moe_parallel.layers.autonomous import AutonomousLayer
from moe_parallel.layers.dispatched import DispatchedLayer
from moe_parallel.layers.expert_layer import ExpertLayer, LayerConfig, LayerContext
from moe_parallel.layers.merged import MergedLayer
from moe_parallel.layers.routed import FactorizedRoutedLayer, RoutedLayer
from moe_parallel.layers.system import Rules, System, register, system_of

__all__ = [
    "AutonomousLayer",
    "DispatchedLayer",
    "ExpertLayer",
    "FactorizedRoutedLayer",
    "LayerConfig",
    "LayerContext",
    "MergedLayer",
    "RoutedLayer",
    "Rules",
    "System",
    "register",
    "system_of",
]
