"""How names and values of options stand in a message of one line."""

from __future__ import annotations

import reprlib
from typing import Any

from moe_parallel.errors import InputError


def flag(name: str) -> str:
    """The flag of a field name: `num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def shown(value: Any) -> str:
    """The repr of `value`, abridged: what a message of one line can hold of anything."""
    abridged = _Abridged()
    abridged.maxlevel, abridged.maxstring, abridged.maxother = 2, 80, 80
    return abridged.repr(value)


class _Abridged(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write very long ones in decimal; YAML may give them in hexadecimal.
        return super().repr_int(x, level) if x.bit_length() < 1000 else hex(x)[:20] + "..."


def as_typed(word: str) -> str:
    """A flag or key of the user's in a message: itself, unless it would break the line."""
    return word if word.isprintable() and len(word) <= 80 else shown(word)


def divides(value: int, name: str, divisor: int, divisor_name: str) -> None:
    """Raise InputError unless the option `divisor_name` divides the option `name`."""
    if value % divisor:
        raise InputError(
            f"{flag(name)} is {value}, which {flag(divisor_name)} {divisor} does not divide: "
            f"choose a multiple of {divisor}"
        )
