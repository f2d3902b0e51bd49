"""Small layers of both kinds, AoE and RoutedMoE."""

from typing import Any

import torch

from moe_parallel import AoE, RoutedMoE

Layer = AoE | RoutedMoE
KINDS = ("aoe", "routed")


def small(kind: str = "aoe", **options: Any) -> Layer:
    """D = 16, E = 4, K = 2; the same weights each time."""
    torch.manual_seed(0)
    if kind == "aoe":
        return AoE(16, 4, 2, 4, ffn_hidden_size=24, **options)
    return RoutedMoE(16, 4, 2, ffn_hidden_size=24, **options)
