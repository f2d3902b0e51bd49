"""Which record belongs to a configuration."""

from __future__ import annotations

from moe_parallel.config import Selection
from moe_parallel.layers.system import System

_SYSTEMS: dict[type[Selection], System] = {}


def register(system: System) -> System:
    """Make `system` what its configuration stands for. Raises ValueError where it has one."""
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
    """The record of a configuration. Raises ValueError where none was registered."""
    system = _SYSTEMS.get(type(selection))
    if system is None:
        raise ValueError(
            f"{type(selection).__name__} has no record: register a System for it "
            "(moe_parallel.systems.register)"
        )
    return system
