"""The registry of systems, from the class of a configuration to its record."""

from __future__ import annotations

from moe_parallel.config import Selection
from moe_parallel.layers.bias import BIAS_FOR, no_bias
from moe_parallel.layers.system import System

_SYSTEMS: dict[type[Selection], System] = {}


def register(system: System) -> System:
    """Register `system` for its configuration class.

    Raises ValueError if the class already has a record, if it has no name for --expert-selection,
    or if it has the options of a bias or of cutoffs and the record does not say what makes these.
    """
    if system.selection in _SYSTEMS:
        raise ValueError(f"{system.selection.__name__} has a record already")
    if "system" not in vars(system.selection):
        raise ValueError(
            f"{system.selection.__name__} has no word of its own for --expert-selection: give its "
            'class one, system="word"'
        )
    _check_bias(system)
    _SYSTEMS[system.selection] = system
    return system


def _check_bias(system: System) -> None:
    if system.bias is not no_bias:
        return
    for options, make in BIAS_FOR.items():
        if issubclass(system.selection, options):
            raise ValueError(
                f"{system.selection.__name__} has the options of {options.__name__}, but its "
                f"record names no bias: add bias={make.__name__} of {make.__module__}, or another "
                "function with these arguments"
            )


def system_of(selection: Selection) -> System:
    """The record of a configuration. Raises ValueError if none is registered."""
    system = _SYSTEMS.get(type(selection))
    if system is None:
        raise ValueError(
            f"{type(selection).__name__} has no record: register a System for it "
            "(moe_parallel.systems.register)"
        )
    return system
