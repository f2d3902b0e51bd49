"""A forced run is the same run in every layout, after a resumption too."""

import functools
from collections.abc import Callable

import pytest

from tests.model.comparison import Start, differences, make_start, run_all
from tests.model.small_gpt import Options
from tests.model.test_layouts import ONE, layout, model
from tests.tiers import rest_in_full

#: The start has the first step of the warm-up; its last step and one more follow.
WARM_UP = {"moe_router_force_routing": "warmup:2"}
SYSTEMS = ["topk", "topk, sigmoid, groups, bias, shared expert", "top_p", "aoe", "aoe_top_p"]
#: The number of ranks, and their layout.
LAYOUTS: dict[str, tuple[int, Options]] = {
    "one, recompute": (1, layout(recompute=True)),
    "dp2": (2, layout()),
    "ep2": (2, layout(ep=2)),
    "tp2, sp": (2, layout(tp=2, etp=2, sp=True)),
    "pp2, virtual, recompute": (2, layout(pp=2, virtual=True, recompute=True)),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Start]:

    @functools.cache
    def of(system: str) -> Start:
        return make_start(model(system) | WARM_UP | ONE, tmp_path_factory.mktemp("start"))

    return of


@pytest.mark.parametrize("name", rest_in_full(LAYOUTS, "tp2, sp", "pp2, virtual, recompute"))
@pytest.mark.parametrize("system", rest_in_full(SYSTEMS, "aoe_top_p"))
def test_layouts_agree(start: Callable[[str], Start], system: str, name: str) -> None:
    world, spread = LAYOUTS[name]
    found = run_all(world, start(system), {name: model(system) | WARM_UP | spread})
    assert differences(found, start(system).on_one_rank) == {}
