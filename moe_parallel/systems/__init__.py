"""The systems of expert selection, one room each: the options, the rule and the record.

A room is a package whose `__init__` has the options, which import no torch, so that `--help` is
quick, and whose module `rule` has the rule and registers the record. A system of one's own may be
one module with all three, here or anywhere (docs/systems/README.md).
"""

import importlib
import pkgutil

from moe_parallel.config.selection.selection import SELECTIONS

# isort: off
# In the order of --help.
from moe_parallel.systems.topk import TopKSelection
from moe_parallel.systems.aoe import AoESelection
from moe_parallel.systems.top_p import AoETopPSelection, TopPSelection
from moe_parallel.systems.threshold import AoEThresholdSelection, ThresholdSelection
from moe_parallel.systems.relu import ReLUSelection
from moe_parallel.systems.expert_choice import AoEExpertChoiceSelection, ExpertChoiceSelection
from moe_parallel.systems.routing_free import RoutingFreeSelection
from moe_parallel.systems.uoe import UoESelection
from moe_parallel.systems.lory import (
    LoryPrefixSelection,
    LorySelection,
    SegmentExpertChoiceSelection,
)
from moe_parallel.systems.smear import SmearSelection
from moe_parallel.systems.hash import HashSelection

# isort: on

for _room in pkgutil.iter_modules(__path__, f"{__name__}."):  # also those that are not named above
    importlib.import_module(_room.name)

__all__ = [
    "SELECTIONS",
    "AoEExpertChoiceSelection",
    "AoESelection",
    "AoEThresholdSelection",
    "AoETopPSelection",
    "ExpertChoiceSelection",
    "HashSelection",
    "LoryPrefixSelection",
    "LorySelection",
    "ReLUSelection",
    "RoutingFreeSelection",
    "SegmentExpertChoiceSelection",
    "SmearSelection",
    "ThresholdSelection",
    "TopKSelection",
    "TopPSelection",
    "UoESelection",
]
