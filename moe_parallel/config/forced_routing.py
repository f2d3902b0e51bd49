"""The text of --moe-router-force-routing: the name of a workload, and its number."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config.message import shown
from moe_parallel.config.option import Bounds, number
from moe_parallel.errors import InputError

FLAG = "--moe-router-force-routing"
#: The workloads with a number: its value if none is given, and its bounds.
_NUMBERS = {"hot": (0.5, Bounds(above=0, most=1)), "zipf": (1.0, Bounds(least=0, most=10))}
BALANCED = "balanced"
FORMS = f"{BALANCED}, hot:SHARE or zipf:EXPONENT"


@dataclass(frozen=True)
class ForcedRouting:
    """A workload by name, with its number. `balanced` has none."""

    workload: str
    argument: float | None = None


def parse_forced_routing(text: str) -> ForcedRouting:
    """The workload that `text` names. Raises InputError for a text of another form."""
    name, separator, argument = text.partition(":")
    if name == BALANCED and not separator:
        return ForcedRouting(name)
    if name not in _NUMBERS:
        raise InputError(f"{FLAG} is {shown(text)}: it takes {FORMS}")
    default, bounds = _NUMBERS[name]
    value = number(argument) if separator else default
    if value is None:
        raise InputError(f"{FLAG} is {shown(text)}: {name} takes a number, as in {name}:{default}")
    bounds.check(f"{FLAG} {name}", value)
    return ForcedRouting(name, value)
