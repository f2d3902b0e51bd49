"""The workload of a configuration."""

from typing import Any

import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.layers.given_choices import Forcing, build_forcing
from moe_parallel.selection.forced import Balanced, Hot, Zipf
from tests.layers.cases import top_p, topk
from tests.layers.single import Case, build, values


def forcing(text: str | None, **options: Any) -> Forcing | None:
    return build_forcing(make_config({"moe_router_force_routing": text, "seed": 5, **options}))


def test_each_name_has_its_workload() -> None:
    assert forcing(None) is None
    assert build_forcing(make_config({"expert_selection": "lory"})) is None
    assert forcing("balanced") == Forcing(Balanced(), 5)
    assert forcing("hot:0.25") == Forcing(Hot(0.25), 5)
    assert forcing("zipf:2", expert_selection="aoe_top_p") == Forcing(Zipf(2), 5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "selection",
    [
        topk(moe_router_force_routing="hot:1"),
        topk(moe_router_force_routing="hot:1", moe_router_enable_expert_bias=True),
        top_p(moe_router_force_routing="hot:1"),
    ],
    ids=["topk", "topk, balanced by bias", "top_p"],
)
def test_a_layer_routes_as_it_is_told(selection: Any, training: bool) -> None:
    case = Case(selection, tokens=12, training=training)
    given = values(case)
    layer: Any = build(case, given, torch.float64, "reference")
    with layer.context.statistics.evaluating() as totals:
        layer(torch.from_numpy(given["x"]))
    (summary,) = totals.summaries()
    assert summary["tokens_per_expert"][0] == 12
