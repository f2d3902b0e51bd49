"""Mixture-of-experts language models whose experts choose themselves, on Megatron-Core.

    from moe_parallel import AoE, RoutedMoE, record_routing, register_experts

These are layers for any torch model, and experts for those of transformers (docs/library.md). They
are imported at first use, because they import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_parallel.library import AoE, RoutedMoE, record_routing, register_experts

__version__ = "0.1.0"

__all__ = ["AoE", "RoutedMoE", "record_routing", "register_experts"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("moe_parallel.library"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
