"""Numbers as the page gets them: short JSON, arrays of bytes, fewer points and moments.

Shape suffixes: R points in order, B buckets of consecutive points, X anything.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

DIGITS = 5
#: The most points of a curve on the page: a screen is not much wider.
MOST_POINTS = 800


def short(value: float | None) -> float | int | None:
    """The number with five significant digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def shorts(values: Iterable[Any]) -> list[Any]:
    """Nested lists of short numbers, from nested sequences."""
    return [shorts(v) if isinstance(v, (list, tuple, np.ndarray)) else short(v) for v in values]


def as_bytes(values: np.ndarray, top: float) -> dict[str, Any]:
    """An array from 0 to `top` in steps of top / 254: {shape, top, data}. 255 is "no value".

    Larger values become `top`, which the page shows as "top or more".
    """
    finite = np.isfinite(values)
    scaled = np.clip(np.where(finite, values, 0) / (top or 1) * 254, 0, 254).round()
    coded = np.where(finite, scaled, 255).astype(np.uint8)
    data = base64.b64encode(coded.tobytes()).decode("ascii")
    return {"shape": list(values.shape), "top": short(top), "data": data}


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
            kept |= {int(places[pick(values_R[places])]) for pick in (np.argmin, np.argmax)}
    return np.array(sorted(kept))


def slices_of(count: int, most: int) -> list[slice]:
    """At most `most` runs of consecutive places that cover 0 to `count` - 1."""
    edges = np.linspace(0, count, min(count, most) + 1).round().astype(int)
    return [slice(low, high) for low, high in zip(edges[:-1], edges[1:], strict=True)]


def bucket_means(values_RX: np.ndarray, parts: list[slice]) -> np.ndarray:
    """The mean of each bucket without values that are not finite: [B, X...]; NaN if none is."""
    finite_RX = np.isfinite(values_RX)
    total = np.array([np.where(finite_RX[p], values_RX[p], 0).sum(axis=0) for p in parts])
    number = np.array([finite_RX[part].sum(axis=0) for part in parts])
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
