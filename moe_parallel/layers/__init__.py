"""MoE layers: the routed and the autonomous family on a common dispatching base."""

from moe_parallel.config import AoESelection, Selection, TopKSelection
from moe_parallel.layers.autonomous import AutonomousLayer
from moe_parallel.layers.expert_layer import ExpertLayer, LayerContext
from moe_parallel.layers.routed import RoutedLayer

LAYERS: dict[type[Selection], type[ExpertLayer]] = {
    TopKSelection: RoutedLayer,
    AoESelection: AutonomousLayer,
}

__all__ = ["LAYERS", "AutonomousLayer", "ExpertLayer", "LayerContext", "RoutedLayer"]
