"""The configurations of the systems of expert selection: one frozen dataclass per system.

`--expert-selection` selects the class by its name. Only the options of that class are then valid.
A system's record (`moe_parallel.systems`) has its layer, rules and losses.
"""

# Imported first, because --help lists the systems in the order in which classes are defined.
from moe_parallel.config.selection.routed import (  # isort: skip
    ExpertChoiceSelection,
    HashSelection,
    RoutedSelection,
    SegmentExpertChoiceSelection,
    ThresholdSelection,
    TopKSelection,
    TopPSelection,
)
from moe_parallel.config.selection.relu import ReLUSelection  # isort: skip

from moe_parallel.config.selection.autonomous import (
    AoEExpertChoiceSelection,
    AoESelection,
    AoEThresholdSelection,
    AoETopPSelection,
    AutonomousSelection,
)
from moe_parallel.config.selection.balancing import Balancing, BiasBalancing
from moe_parallel.config.selection.factorized import aoe_wide_size
from moe_parallel.config.selection.free_experts import FixedFreeExperts, FreeExperts
from moe_parallel.config.selection.merged import (
    LoryPrefixSelection,
    LorySelection,
    MergedSelection,
    SmearSelection,
)
from moe_parallel.config.selection.parts import (
    DispatchedSelection,
    DynamicChoices,
    ExpertsChoose,
    FixedChoices,
    FixedNumber,
    TokensChoose,
)
from moe_parallel.config.selection.routing_free import RoutingFreeSelection
from moe_parallel.config.selection.segments import Segments
from moe_parallel.config.selection.selection import (
    SELECTIONS,
    LayerWeights,
    ProductWeights,
    Selection,
    SharedExpertSize,
)
from moe_parallel.config.selection.threshold import Cutoffs
from moe_parallel.config.selection.union import UoESelection

__all__ = [
    "SELECTIONS",
    "AoEExpertChoiceSelection",
    "AoESelection",
    "AoEThresholdSelection",
    "AoETopPSelection",
    "AutonomousSelection",
    "Balancing",
    "BiasBalancing",
    "Cutoffs",
    "DispatchedSelection",
    "DynamicChoices",
    "ExpertChoiceSelection",
    "ExpertsChoose",
    "FixedChoices",
    "FixedFreeExperts",
    "FixedNumber",
    "FreeExperts",
    "HashSelection",
    "LayerWeights",
    "LoryPrefixSelection",
    "LorySelection",
    "MergedSelection",
    "ProductWeights",
    "ReLUSelection",
    "RoutedSelection",
    "RoutingFreeSelection",
    "SegmentExpertChoiceSelection",
    "Segments",
    "Selection",
    "SharedExpertSize",
    "SmearSelection",
    "ThresholdSelection",
    "TokensChoose",
    "TopKSelection",
    "TopPSelection",
    "UoESelection",
    "aoe_wide_size",
]
