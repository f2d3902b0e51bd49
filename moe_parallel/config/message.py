"""Names and values of options, formatted for a message of one line."""

from __future__ import annotations

import reprlib
from typing import Any

from moe_parallel.errors import InputError


def flag(name: str) -> str:
    """The flag of a field name: `num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def shown(value: Any) -> str:
    """The repr of `value`, shortened so that it fits in a message of one line."""
    abridged = _Abridged()
    abridged.maxlevel, abridged.maxstring, abridged.maxother = 2, 80, 80
    return abridged.repr(value)


class _Abridged(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python does not print very long integers in decimal; YAML can have them in hexadecimal.
        return super().repr_int(x, level) if x.bit_length() < 1000 else hex(x)[:20] + "..."


def counted(number: int, noun: str) -> str:
    """`1 rank`, `1,200 ranks`; for nouns whose plural ends in s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def as_typed(word: str) -> str:
    """A flag or key as the user typed it, unless it would break the line of the message."""
    return word if word.isprintable() and len(word) <= 80 else shown(word)


def divides(value: int, name: str, divisor: int, divisor_name: str) -> None:
    """Raise InputError unless the option `divisor_name` divides the option `name`."""
    if value % divisor:
        raise InputError(
            f"{flag(name)} is {value}, which {flag(divisor_name)} {divisor} does not divide: "
            f"choose a multiple of {divisor}"
        )
