"""Selects the cases of a tier (tests/conftest.py): a covering subset, named cases, or a share.

`selected_values` tells a fixture which cases will run.
"""

import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """The positions of a subset of `rows`, one value per column, that covers its combinations.

    Any `strength` values that occur together in `rows` occur together in the subset; all values of
    a row, if it has fewer. The row with the most new combinations is added, the first among equals,
    until no row adds one. The same rows always give the same subset. A smaller subset may exist.
    """
    width = len(rows[0]) if rows else 0
    columns = list(combinations(range(width), min(strength, width)))
    held = [{(of, *(row[column] for column in of)) for of in columns} for row in rows]
    missing = set().union(*held)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(held[i] & missing))
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)


def rest_in_full(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters for pytest: those not in `quick` run only in the full tier."""
    values = list(values)
    assert set(quick) <= set(values), f"{quick} are not all among {values}"
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.full) for value in values
    ]


@dataclass(frozen=True)
class Share:
    """One part of `parts`. A name is in the part that its checksum names, on every machine."""

    part: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> "Share":
        """Of "3/8"; raises ValueError for what is not a part."""
        part, parts = (int(word) for word in text.split("/"))
        if not 0 <= part < parts:
            raise ValueError(f"{text}: parts are 0 to {parts - 1}")
        return cls(part, parts)

    def holds(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % self.parts == self.part


def selected_values(
    request: pytest.FixtureRequest, parameter: str, values: Iterable[Any]
) -> list[Any]:
    """Those of `values` that the selected tests of the fixture's file have as this parameter."""
    items = [item for item in request.session.items if item.path == request.path]
    named = {item.callspec.params.get(parameter) for item in items if hasattr(item, "callspec")}
    return [value for value in values if value in named]
