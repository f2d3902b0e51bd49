"""Do contenders compute the same? Nobody is faster than another at a different task."""

from __future__ import annotations

import torch
from torch import Tensor

from tools.bench.contender import Values

# Of the largest value of a tensor. Contenders round at different places and sum in a different
# order; a wrong row or a forgotten gate is off by about the size of the values themselves.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def disagreement(values: Values, expected: Values, dtype: torch.dtype) -> str | None:
    """What differs most, beyond rounding, or None. Values with other names or shapes differ."""
    if values.keys() != expected.keys():
        return f"has {', '.join(values)} instead of {', '.join(expected)}"
    worst, worst_name = 0.0, ""
    for name, value in values.items():
        if value.shape != expected[name].shape:
            return f"{name} is {tuple(value.shape)}, not {tuple(expected[name].shape)}"
        distance = _distance(value, expected[name])
        if not distance <= worst:  # so that NaN counts
            worst, worst_name = distance, name
    if worst <= TOLERANCE[dtype]:
        return None
    return f"{worst_name} is off by {worst:.1e} of its largest value"


def _distance(value: Tensor, expected: Tensor) -> float:
    """The largest difference in units of the largest value; integers differ or do not."""
    if value.numel() == 0:
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(value, expected) else float("inf")
    difference = (value.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max().clamp(min=1e-30))
