"""The rows that an expert of each system accepts: K counts if it is fixed, unless turned off."""

from typing import Any

import pytest

from moe_parallel.config import make_config
from moe_parallel.layers.dispatched import build_capacity


@pytest.mark.parametrize(
    ("options", "rows"),  # of 64 tokens and 8 experts at factor 1.5
    [
        ({}, 24),  # K = 2
        ({"moe_router_topk": 1}, 12),
        ({"moe_router_topk": 3}, 36),
        ({"moe_capacity_counts_topk": False}, 12),
        ({"moe_capacity_counts_topk": False, "moe_router_topk": 3}, 12),
        ({"expert_selection": "aoe"}, 24),
        ({"expert_selection": "aoe", "moe_capacity_counts_topk": False}, 12),
        # The number of experts per token varies.
        ({"expert_selection": "top_p"}, 12),
        ({"expert_selection": "aoe_top_p"}, 12),
        ({"expert_selection": "expert_choice"}, 12),
        ({"expert_selection": "aoe_expert_choice", "moe_capacity_counts_topk": False}, 12),
    ],
)
def test_rows_of_an_expert(options: dict[str, Any], rows: int) -> None:
    config = make_config({"num_experts": 8, "moe_expert_capacity_factor": 1.5, **options})
    rule = build_capacity(config)
    assert rule is not None
    assert rule.rows_per_expert(64, 8) == rows


def test_without_a_factor_nothing_is_dropped() -> None:
    assert build_capacity(make_config({"num_experts": 8})) is None
