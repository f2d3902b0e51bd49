"""The options that systems of expert selection share, and the registry of their classes.

`--expert-selection` selects the class by its word. Only the options of that class are then valid.
The classes themselves are in `moe_parallel.systems`, one room a system.
"""

from moe_parallel.config.selection.balancing import Balancing, BiasBalancing
from moe_parallel.config.selection.kinds import (
    AutonomousSelection,
    MergedSelection,
    RoutedSelection,
    Segments,
    aoe_wide_size,
)
from moe_parallel.config.selection.parts import (
    DispatchedSelection,
    FixedChoices,
    FixedNumber,
    FreeExperts,
    TokensChoose,
    TopKChoices,
)
from moe_parallel.config.selection.selection import (
    Selection,
    SharedExpertSize,
    recorded_name,
    selection_of,
    selections,
)

__all__ = [
    "AutonomousSelection",
    "Balancing",
    "BiasBalancing",
    "DispatchedSelection",
    "FixedChoices",
    "TopKChoices",
    "FixedNumber",
    "FreeExperts",
    "MergedSelection",
    "RoutedSelection",
    "Segments",
    "Selection",
    "SharedExpertSize",
    "TokensChoose",
    "aoe_wide_size",
    "recorded_name",
    "selection_of",
    "selections",
]
