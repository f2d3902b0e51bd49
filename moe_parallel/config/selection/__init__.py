"""Who decides which expert computes: one frozen dataclass per system, one word names it.

`--expert-selection` picks the class; only its options are then valid. A new system is a new class
here, entered in `SELECTIONS`.
"""

from __future__ import annotations

from moe_parallel.config.selection.autonomous import (
    AoEExpertChoiceSelection,
    AoESelection,
    AoETopPSelection,
    AutonomousSelection,
    aoe_wide_size,
)
from moe_parallel.config.selection.merged import (
    LoryPrefixSelection,
    LorySelection,
    MergedSelection,
    SmearSelection,
)
from moe_parallel.config.selection.parts import ExpertSelection
from moe_parallel.config.selection.routed import (
    ExpertChoiceSelection,
    RoutedSelection,
    SegmentExpertChoiceSelection,
    TopKSelection,
    TopPSelection,
)

__all__ = [
    "SELECTIONS",
    "AoEExpertChoiceSelection",
    "AoESelection",
    "AoETopPSelection",
    "AutonomousSelection",
    "ExpertChoiceSelection",
    "LoryPrefixSelection",
    "LorySelection",
    "MergedSelection",
    "RoutedSelection",
    "SegmentExpertChoiceSelection",
    "Selection",
    "SmearSelection",
    "TopKSelection",
    "TopPSelection",
    "aoe_wide_size",
    "selection_name",
]

Selection = ExpertSelection

SELECTIONS: dict[str, type[Selection]] = {
    "topk": TopKSelection,
    "top_p": TopPSelection,
    "expert_choice": ExpertChoiceSelection,
    "aoe": AoESelection,
    "aoe_top_p": AoETopPSelection,
    "aoe_expert_choice": AoEExpertChoiceSelection,
    "lory": LorySelection,
    "lory_prefix": LoryPrefixSelection,
    "smear": SmearSelection,
    "segment_expert_choice": SegmentExpertChoiceSelection,
}


def selection_name(selection: Selection) -> str:
    """The word that names the system of `selection` on the command line."""
    return next(name for name, kind in SELECTIONS.items() if type(selection) is kind)
