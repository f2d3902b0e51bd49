"""lory, lory_prefix: the mean of an earlier segment gives a segment's merge weights."""

from __future__ import annotations

from moe_parallel.config import LoryPrefixSelection, LorySelection
from moe_parallel.layers import LoryLayer, Rules, System
from moe_parallel.layers.system import keeps_output
from moe_parallel.selection.segments import by_first, by_previous
from moe_parallel.systems.registry import register


def rules(selection: LorySelection) -> Rules:
    return Rules(by_previous, by_first if selection.lory_inference == "prompt" else by_previous)


LORY = register(System(LorySelection, layer=LoryLayer, rules=rules, upcycling=keeps_output))
LORY_PREFIX = register(
    System(
        LoryPrefixSelection,
        layer=LoryLayer,
        rules=lambda _: Rules(by_first, by_first),
        upcycling=keeps_output,
    )
)
