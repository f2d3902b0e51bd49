"""Numbers as the page gets them: short JSON, and arrays of bytes."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

DIGITS = 5


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
