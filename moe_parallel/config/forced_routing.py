"""The text of --moe-router-force-routing: the name of a workload, and its number or file."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config.message import shown
from moe_parallel.config.option import Bounds, number
from moe_parallel.errors import InputError

FLAG = "--moe-router-force-routing"
#: The workloads with a number: its value if none is given, its bounds, and whether it is whole.
_NUMBERS: dict[str, tuple[float, Bounds, bool]] = {
    "hot": (0.5, Bounds(above=0, most=1), False),
    "zipf": (1.0, Bounds(least=0, most=10), False),
    "warmup": (100, Bounds(least=1), True),
}
BALANCED, TRACE = "balanced", "trace"
WORKLOADS = (BALANCED, *_NUMBERS, TRACE)
FORMS = f"{BALANCED}, hot:SHARE, zipf:EXPONENT, warmup:ITERATIONS or {TRACE}:FILE"


@dataclass(frozen=True)
class ForcedRouting:
    """A workload by name, with its number or its file. `balanced` has neither."""

    workload: str  # one of WORKLOADS
    argument: int | float | str | None = None


def parse_forced_routing(text: str) -> ForcedRouting:
    """The workload that `text` names. Raises InputError for a text of another form."""
    name, separator, argument = text.partition(":")
    if name not in WORKLOADS:
        raise InputError(f"{FLAG} is {shown(text)}: it takes {FORMS}")
    if name == TRACE:
        if not argument:
            raise InputError(f"{FLAG} is {shown(text)}: name the file, as in trace:metrics.jsonl")
        return ForcedRouting(name, argument)
    if name == BALANCED:
        if separator:
            raise InputError(f"{FLAG} is {shown(text)}: {BALANCED} takes nothing after its name")
        return ForcedRouting(name)
    default, bounds, whole = _NUMBERS[name]
    if not separator:
        return ForcedRouting(name, default)
    value = number(argument)
    if value is None or (whole and not isinstance(value, int)):
        kind = "an integer" if whole else "a number"
        raise InputError(f"{FLAG} is {shown(text)}: {name} takes {kind}, as in {name}:{default}")
    bounds.check(f"{FLAG} {name}", value)
    return ForcedRouting(name, value)
