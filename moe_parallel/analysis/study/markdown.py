"""Tables and numbers in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "–"
MINUS = "−"

Cells = Sequence[str]


def markdown_table(heads: Cells, rows: Sequence[Cells]) -> str:
    """A table whose first column is aligned to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, rule, *rows]) + "\n"


def fixed(number: float, places: int, sign: str = "") -> str:
    """The number with so many decimals; `sign` "+" also shows that of a positive one."""
    rounded = round(number, places) + 0.0  # never -0.000
    return f"{rounded:{sign}.{places}f}".replace("-", MINUS)


def signed(number: float, places: int = 4) -> str:
    return fixed(number, places, "+")
