"""A few of many combinations, in which every pair of values still meets."""

from collections.abc import Hashable, Sequence
from itertools import combinations


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """The positions of rows in which any `strength` values occur together that do so in `rows`.

    A row has a value in each column. The row with the most new combinations is taken until none
    is new, the first of equal ones: the same rows give the same answer. Few rows are left out that
    a smaller set could do without, so this is a greedy answer, not the smallest one.
    """
    columns = list(combinations(range(len(rows[0]) if rows else 0), strength))
    held = [{(of, *(row[column] for column in of)) for of in columns} for row in rows]
    missing = set().union(*held)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(held[i] & missing))
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)
