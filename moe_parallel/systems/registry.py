"""The registry of systems, from the class of a configuration to its record."""

from __future__ import annotations

from moe_parallel.config import Selection
from moe_parallel.layers.system import System

_SYSTEMS: dict[type[Selection], System] = {}


def register(system: System) -> System:
    """Register `system` for its configuration class.

    Raises ValueError if the class already has a record, or no name for --expert-selection.
    """
    if system.selection in _SYSTEMS:
        raise ValueError(f"{system.selection.__name__} has a record already")
    if "system" not in vars(system.selection):
        raise ValueError(
            f"{system.selection.__name__} has no word of its own for --expert-selection: give its "
            'class one, system="word"'
        )
    _SYSTEMS[system.selection] = system
    return system


def system_of(selection: Selection) -> System:
    """The record of a configuration. Raises ValueError if none is registered."""
    system = _SYSTEMS.get(type(selection))
    if system is None:
        raise ValueError(
            f"{type(selection).__name__} has no record: register a System for it "
            "(moe_parallel.systems.register)"
        )
    return system
