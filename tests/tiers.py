"""Selects the cases of the quick tier (tests/conftest.py): a covering subset or named cases.

`selected_values` tells a fixture which cases will run.
"""

from collections.abc import Hashable, Iterable, Sequence
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


def selected_values(
    request: pytest.FixtureRequest, parameter: str, values: Iterable[Any]
) -> list[Any]:
    """Those of `values` that the selected tests of the fixture's file have as this parameter."""
    items = [item for item in request.session.items if item.path == request.path]
    named = {item.callspec.params.get(parameter) for item in items if hasattr(item, "callspec")}
    return [value for value in values if value in named]
