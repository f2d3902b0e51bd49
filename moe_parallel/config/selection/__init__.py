"""The configurations of the systems of expert selection: one frozen dataclass per system.

`--expert-selection` selects the class by its name. Only the options of that class are then valid.
A system's record (`moe_parallel.systems`) has its layer, rules and losses.
"""

# Imported first, because --help lists the systems in the order in which classes are defined.
from moe_parallel.config.selection.routed import (  # isort: skip
    ExpertChoiceSelection,
    RoutedSelection,
    SegmentExpertChoiceSelection,
    TopKSelection,
    TopPSelection,
)

from moe_parallel.config.selection.autonomous import (
    AoEExpertChoiceSelection,
    AoESelection,
    AoETopPSelection,
    AutonomousSelection,
)
from moe_parallel.config.selection.factorized import aoe_wide_size
from moe_parallel.config.selection.merged import (
    LoryPrefixSelection,
    LorySelection,
    MergedSelection,
    SmearSelection,
)
from moe_parallel.config.selection.parts import (
    Balancing,
    BiasBalancing,
    DispatchedSelection,
    DynamicChoices,
    ExpertsChoose,
    FixedChoices,
    TokensChoose,
)
from moe_parallel.config.selection.segments import Segments
from moe_parallel.config.selection.selection import SELECTIONS, LayerWeights, Selection

__all__ = [
    "SELECTIONS",
    "AoEExpertChoiceSelection",
    "AoESelection",
    "AoETopPSelection",
    "AutonomousSelection",
    "Balancing",
    "BiasBalancing",
    "DispatchedSelection",
    "DynamicChoices",
    "ExpertChoiceSelection",
    "ExpertsChoose",
    "FixedChoices",
    "LayerWeights",
    "LoryPrefixSelection",
    "LorySelection",
    "MergedSelection",
    "RoutedSelection",
    "SegmentExpertChoiceSelection",
    "Segments",
    "Selection",
    "SmearSelection",
    "TokensChoose",
    "TopKSelection",
    "TopPSelection",
    "aoe_wide_size",
]
