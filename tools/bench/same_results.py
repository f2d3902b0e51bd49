"""Checks that contenders compute the same. Speeds at different tasks are not comparable."""

from __future__ import annotations

import torch
from torch import Tensor

from tools.bench.contender import Values

# Relative to the largest value of a tensor. Contenders round at different places and sum in a
# different order. A wrong row or a missing prob causes an error about as large as the values.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def disagreement(values: Values, expected: Values, dtype: torch.dtype) -> str | None:
    """The value that differs most, beyond rounding, or None. Other names or shapes also differ."""
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
