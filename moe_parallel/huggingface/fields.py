"""The fields of a config.json, read with one-line errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_parallel.config.message import shown
from moe_parallel.errors import InputError
from moe_parallel.reading import read_json

#: Stands for "the field must be there".
NEEDED = object()


@dataclass(frozen=True)
class Fields:
    """The fields of a config.json. Each method raises InputError for a wrong value.

    A field that is null counts as absent, as in transformers.
    """

    file: Path
    values: Mapping[str, Any]

    def integer(self, *names: str, default: Any = NEEDED, least: int = 1) -> Any:
        """An integer of at least `least`: the first of `names` that is there."""
        name, value = self._first(names, default)
        if value is default:
            return default
        if type(value) is not int or value < least:
            raise self.wrong(name, f"an integer of at least {least}")
        return value

    def number(self, name: str, default: Any = NEEDED) -> float:
        """A number."""
        _, value = self._first((name,), default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        return float(value)

    def truth(self, name: str, default: bool) -> bool:
        """true or false."""
        _, value = self._first((name,), default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """A text."""
        _, value = self._first((name,), default)
        if not isinstance(value, str | None):
            raise self.wrong(name, "a text")
        return value

    def integers(self, name: str) -> list[int]:
        """A list of integers; [] if it is absent. One integer counts as a list of it."""
        _, value = self._first((name,), [])
        several = value if isinstance(value, list) else [value]
        if not all(type(each) is int for each in several):
            raise self.wrong(name, "a list of integers")
        return several

    def part(self, name: str) -> Fields:
        """A field that has fields itself; an absent one has none."""
        _, value = self._first((name,), {})
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(self.file, value)

    def refuse(self, name: str, accepted: tuple[Any, ...], why: str) -> None:
        """Raise InputError unless the field is absent or one of `accepted`."""
        value = self.values.get(name)
        if value is not None and value not in accepted:
            raise InputError(f"{self.file}: {name} is {shown(value)}: {why}")

    def wrong(self, name: str, expected: str) -> InputError:
        """The error of a field whose value is not as expected."""
        return InputError(
            f"{self.file}: {name} is {shown(self.values.get(name))}: it must be {expected}"
        )

    def _first(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        if default is NEEDED:
            raise InputError(f"{self.file}: it has no {names[0]}: take the model's own config.json")
        return names[0], default


def read_fields(file: Path) -> Fields:
    """The fields of a config.json. Raises InputError for a file that is missing or damaged."""
    if not file.exists():
        raise InputError(f"{file}: there is no such file: name a folder that save_pretrained wrote")
    values = read_json(file, ": fetch it again")
    if not isinstance(values, dict):
        raise InputError(f"{file} is not a configuration: it is not a JSON object")
    return Fields(file, values)
