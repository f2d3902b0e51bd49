"""The parts of an optimizer of Megatron-Core."""

from __future__ import annotations

from typing import Any


def optimizer_parts(optimizer: Any) -> list[Any]:
    """The optimizers that update weights: one for dense and one for expert weights if ranks divide
    them differently, and otherwise the optimizer itself."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts
