"""Fewer points for a curve, and fewer moments for a map, with what must stay visible.

Shape suffixes: R points in order, B buckets of consecutive points, X anything.
"""

from __future__ import annotations

import numpy as np

#: The most points of a curve on the page: a screen is not much wider.
MOST_POINTS = 800


def thinned(values_R: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """The places of at most `most` points that draw the same curve: int64, ascending.

    The points are divided into buckets of equal size, and each bucket keeps its smallest and its
    largest finite value, and one value that is not finite, if it has them. A spike of one point is
    thus never lost. The first and the last point are always kept.
    """
    count = len(values_R)
    if count <= most:
        return np.arange(count)
    kept = {0, count - 1}
    for part in np.array_split(np.arange(count), max(1, (most - 2) // 3)):
        finite = np.isfinite(values_R[part])
        if not finite.all():
            kept.add(int(part[~finite][0]))
        if finite.any():
            places = part[finite]
            kept.add(int(places[np.argmin(values_R[places])]))
            kept.add(int(places[np.argmax(values_R[places])]))
    return np.array(sorted(kept))


def slices_of(count: int, most: int) -> list[slice]:
    """At most `most` runs of consecutive places that cover 0 to `count` - 1."""
    edges = np.linspace(0, count, min(count, most) + 1).round().astype(int)
    return [slice(low, high) for low, high in zip(edges[:-1], edges[1:], strict=True)]


def bucket_means(values_RX: np.ndarray, parts: list[slice]) -> np.ndarray:
    """The mean of each bucket without values that are not finite: [B, X...]; NaN if none is."""
    finite_RX = np.isfinite(values_RX)
    sums = [np.where(finite_RX[part], values_RX[part], 0).sum(axis=0) for part in parts]
    counts = [finite_RX[part].sum(axis=0) for part in parts]
    total, number = np.array(sums), np.array(counts)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
