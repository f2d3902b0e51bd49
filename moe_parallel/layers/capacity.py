"""The capacity rule that belongs to a configuration."""

from __future__ import annotations

from typing import Any

from moe_parallel.config import Config, FreeExperts, Selection
from moe_parallel.selection.capacity import DROP_ORDERS, Capacity


def build_capacity(config: Config) -> Capacity | None:
    """The capacity rule of a configuration. Returns None if the model is dropless."""
    moe = config.moe
    if moe.moe_expert_capacity_factor is None:
        return None
    return Capacity(
        moe.moe_expert_capacity_factor,
        DROP_ORDERS[moe.moe_token_drop_policy],
        moe.moe_pad_expert_input_to_capacity,
        config.selection.choices_per_token or 1 if moe.moe_capacity_counts_topk else 1,
        **_free_experts(config.selection),
    )


def _free_experts(selection: Selection) -> dict[str, Any]:
    if not isinstance(selection, FreeExperts):
        return {}
    return {"num_free": selection.free_experts, "tau": selection.moe_free_expert_tau}
