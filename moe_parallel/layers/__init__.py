"""Layers of experts in three families: routed and autonomous, whose tokens travel, and merged."""

from moe_parallel.config import (
    AoEExpertChoiceSelection,
    AoESelection,
    AoETopPSelection,
    AutonomousSelection,
    ExpertChoiceSelection,
    LoryPrefixSelection,
    LorySelection,
    RoutedSelection,
    SegmentExpertChoiceSelection,
    Selection,
    SmearSelection,
    TopKSelection,
    TopPSelection,
)
from moe_parallel.layers.autonomous import AutonomousLayer, SelectedGradientLayer
from moe_parallel.layers.dispatched import DispatchedLayer
from moe_parallel.layers.expert_layer import ExpertLayer, LayerContext
from moe_parallel.layers.merged import LoryLayer, MergedLayer, SmearLayer
from moe_parallel.layers.routed import FactorisedRoutedLayer, RoutedLayer

LAYERS: dict[type[Selection], type[ExpertLayer]] = {
    TopKSelection: RoutedLayer,
    TopPSelection: RoutedLayer,
    ExpertChoiceSelection: RoutedLayer,
    AoESelection: AutonomousLayer,
    AoETopPSelection: AutonomousLayer,
    AoEExpertChoiceSelection: AutonomousLayer,
    LorySelection: LoryLayer,
    LoryPrefixSelection: LoryLayer,
    SmearSelection: SmearLayer,
    SegmentExpertChoiceSelection: RoutedLayer,
}

__all__ = [
    "AutonomousLayer",
    "DispatchedLayer",
    "ExpertLayer",
    "FactorisedRoutedLayer",
    "LayerContext",
    "MergedLayer",
    "RoutedLayer",
    "SelectedGradientLayer",
    "layer_class",
]


def layer_class(selection: Selection) -> type[ExpertLayer]:
    """The layer of a system, and of what its options make of it."""
    if isinstance(selection, RoutedSelection) and selection.moe_gate_low_rank_size is not None:
        return FactorisedRoutedLayer
    if isinstance(selection, AutonomousSelection) and selection.aoe_gradient != "full":
        return SelectedGradientLayer
    return LAYERS[type(selection)]
