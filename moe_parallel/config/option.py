"""Options: dataclass fields that are also flags and YAML keys.

A section of the configuration is a frozen dataclass whose fields are made by `option`. The field's
name gives the flag (`num_layers` -> `--num-layers`), its annotation gives the type, and its default
is the default. Nothing about a flag is written twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_parallel.config.message import flag, shown
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class Section:
    """A frozen dataclass of options, with the rules between them and the other sections."""

    def check(self, config: Config, world_size: int) -> None:
        """Raise InputError for the first rule that this section of `config` breaks.

        Each value has already been checked against its bounds (`Option.check`). A subclass first
        calls this method of its parent.
        """


# Far above any useful value. A mistyped number must not fill the memory or overflow fp32.
_INTEGER_AT_MOST = 2**31 - 1
_FLOAT_AT_MOST = 1_000_000
_FLOAT_ABOVE_0_AT_LEAST = 1e-30


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number. None: no specific bound on that side."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def check(self, flag: str, value: Any) -> None:
        """Raise InputError, with `flag` in its message, if the number is out of bounds."""
        if type(value) not in (int, float):
            return
        if self.least is not None and not value >= self.least:
            raise InputError(f"{flag} is {value}: it must be at least {self.least}")
        if self.above is not None and not value > self.above:
            raise InputError(f"{flag} is {value}: it must be above {self.above}")
        if self.below is not None and not value < self.below:
            raise InputError(f"{flag} is {shown(value)}: it must be below {self.below}")
        most = self.most
        if most is None:
            most = _INTEGER_AT_MOST if type(value) is int else _FLOAT_AT_MOST
        if value > most:
            raise InputError(f"{flag} is {shown(value)}: it must be at most {most}")
        if 0 < value < _FLOAT_ABOVE_0_AT_LEAST:
            raise InputError(
                f"{flag} is {value}, too small for fp32: it must be at least "
                f"{_FLOAT_ABOVE_0_AT_LEAST}, or 0 where that means off"
            )


_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_TEXT_MAX = 4096  # the longest path in Linux


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    weights: bool = False,
    state: bool = False,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field that is also a flag and a YAML key.

    Args:
        default: the value if none is given.
        help: its text in `--help`.
        choices: the words that a text may be; empty: any text.
        weights: whether it affects which weights a model has, or their meaning. A checkpoint fits
            only if all such options are the same.
        state: whether it affects which numbers that move after a step a checkpoint has. Only its
            message needs this: it names the option if a checkpoint has other numbers.
        least, above, most, below: the bounds of a number.
    """
    bounds = Bounds(least, above, most, below)
    metadata = {
        "help": help, "choices": choices, "weights": weights, "state": state, "bounds": bounds,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def with_default(section: type, name: str, default: Any) -> Any:
    """The option `name` of a section class, for a subclass with a different default."""
    (field,) = (each for each in dataclasses.fields(section) if each.name == name)
    return dataclasses.field(default=default, metadata=field.metadata)


@dataclasses.dataclass(frozen=True)
class Option:
    """One flag, as read from a dataclass field."""

    name: str
    kind: type  # int, float, bool or str
    optional: bool  # whether None is a value
    many: bool  # a tuple of `kind`
    default: Any
    help: str
    choices: tuple[str, ...]
    weights: bool = False  # whether a checkpoint fits only if this is the same
    state: bool = False  # whether numbers that a checkpoint has depend on it
    bounds: Bounds = Bounds()

    @property
    def flag(self) -> str:
        return flag(self.name)

    def check(self, value: Any) -> None:
        """Raise InputError for a number out of bounds."""
        numbers = value if self.many and value is not None else (value,)
        for number in numbers:
            self.bounds.check(self.flag, number)

    def parse(self, raw: Any) -> Any:
        """`raw` (a string of the command line or a YAML scalar or list) as a value of this option.

        Raises InputError if it has another type or is not one of the choices.
        """
        if raw is None or raw == "none" or (self.many and raw == ["none"]):
            if self.optional:
                return None
            raise InputError(f"{self.flag} needs a value: give it {self._expected}")
        if self.many:
            items = raw.split() if isinstance(raw, str) else raw
            if not isinstance(items, list) or not items:
                raise self._wrong(raw)
            return tuple(self._parse_one(item) for item in items)
        return self._parse_one(raw)

    def _wrong(self, raw: Any) -> InputError:
        return InputError(f"{self.flag} is {shown(raw)}: it takes {self._expected}")

    @property
    def _expected(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.many:
            words = "integers" if self.kind is int else "words"
            return f"{words} on one line, or a YAML list of them"
        return {
            int: "an integer",
            float: "a finite number",
            bool: "true or false",
            str: "text of one line, in YAML best in quotes",
        }[self.kind]

    def _parse_one(self, raw: Any) -> Any:
        if self.kind is bool:
            if str(raw).lower() not in ("true", "false"):
                raise self._wrong(raw)
            return str(raw).lower() == "true"
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise self._wrong(raw)
        if self.kind is str:
            self._check_text(str(raw))
            value: Any = str(raw)
        else:
            value = self._number(raw)
        if self.choices and value not in self.choices:
            raise self._wrong(raw)
        return value

    def _number(self, raw: str | int | float) -> int | float:
        value = number(raw) if isinstance(raw, str) else raw
        if self.kind is float and isinstance(value, int):
            value = _as_float(value)
        if value is None or type(value) is not self.kind:
            raise self._wrong(raw)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._wrong(raw)
        return value

    def _check_text(self, value: str) -> None:
        if not (value.strip() and value.isprintable() and len(value) <= _TEXT_MAX):
            raise self._wrong(value)
        if value.startswith("~"):
            raise InputError(
                f"{self.flag} is {shown(value)}, but ~ is not expanded here: write the full path"
            )


def number(text: str) -> int | float | None:
    """The decimal number in a flag or a YAML value. Returns None if `text` is not a number.

    Python's int() and float() accept more: spaces, 1_000, digits of every script.
    """
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return float(text) if set(text) & set(".eE") else int(text)
    except ValueError:  # thousands of digits
        return None


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def options(section: type) -> tuple[Option, ...]:
    """The options of a section class, in the order of its fields."""
    return _options(section)  # type: ignore[arg-type]  # mypy takes a class for unhashable


@functools.cache
def _options(section: type) -> tuple[Option, ...]:
    annotations = typing.get_type_hints(section)
    return tuple(
        _option(field, annotations[field.name])
        for field in dataclasses.fields(section)
        if "help" in field.metadata
    )


def _option(field: dataclasses.Field[Any], annotation: Any) -> Option:
    arguments = typing.get_args(annotation)
    optional = type(None) in arguments
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        (annotation,) = (a for a in arguments if a is not type(None))
    many = typing.get_origin(annotation) is tuple
    kind = typing.get_args(annotation)[0] if many else annotation
    return Option(
        name=field.name,
        kind=kind,
        optional=optional,
        many=many,
        default=field.default,
        help=field.metadata["help"],
        choices=field.metadata["choices"],
        weights=field.metadata["weights"],
        state=field.metadata["state"],
        bounds=field.metadata["bounds"],
    )


def build(section: type, values: Mapping[str, Any]) -> Any:
    """An instance of a section from the parsed values that name its fields."""
    names = {field.name for field in dataclasses.fields(section)}
    return section(**{name: value for name, value in values.items() if name in names})
