"""A forced run is the same run in every layout, after a resumption too."""

from pathlib import Path

import pytest

from tests.model.small_gpt import Options
from tests.model.test_layouts import ONE, differences, layout, make_start, model, run_all
from tests.tiers import rest_in_full

SYSTEMS = ["topk", "topk, sigmoid, groups, bias, shared expert", "top_p", "aoe", "aoe_top_p"]
#: The number of ranks, and their layout.
LAYOUTS: dict[str, tuple[int, Options]] = {
    "one, recompute": (1, layout(recompute=True)),
    "dp2": (2, layout()),
    "ep2": (2, layout(ep=2)),
    "tp2, sp": (2, layout(tp=2, etp=2, sp=True)),
    "pp2, virtual, recompute": (2, layout(pp=2, virtual=True, recompute=True)),
}


@pytest.mark.parametrize("name", rest_in_full(LAYOUTS, "tp2, sp", "pp2, virtual, recompute"))
@pytest.mark.parametrize("system", rest_in_full(SYSTEMS, "aoe_top_p"))
def test_layouts_agree(tmp_path: Path, system: str, name: str) -> None:
    world, spread = LAYOUTS[name]
    options = model(system) | {"moe_router_force_routing": "warmup:4"}
    start = make_start(options | ONE, tmp_path)  # two steps of the warm-up; three follow
    found = run_all(world, start, {name: options | spread})
    assert differences(found, start.on_one_rank) == {}
