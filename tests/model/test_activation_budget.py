"""A run whose experts compute in parts equals a run without a budget, in every layout."""

from pathlib import Path

import pytest

from moe_parallel.ops import extension
from tests.model.small_gpt import Options
from tests.model.test_layouts import ONE, differences, layout, make_start, model, run_all
from tests.tiers import rest_in_full

BACKENDS = ["reference"] + ["native"] * extension.is_built()
SYSTEMS = ["topk", "aoe", "aoe_top_p"]
BUDGET = {"moe_activation_budget": 0.01}  # about eight rows; a rank receives at least thirty

#: Layouts by the number of ranks.
LAYOUTS: dict[int, dict[str, Options]] = {
    1: {"one": ONE, "one, recompute": layout(recompute=True)},
    2: {
        "ep2, distributed optimizer": layout(ep=2, distributed=True),
        "tp2, etp2": layout(tp=2, etp=2),
        "tp2, ep2": layout(tp=2, ep=2),
        "pp2, virtual, recompute": layout(pp=2, virtual=True, recompute=True),
        "ep2, main gradients": layout(ep=2) | {"gradient_accumulation_fusion": True},
    },
}


@pytest.mark.parametrize("backend", rest_in_full(BACKENDS, BACKENDS[-1]))
@pytest.mark.parametrize("system", rest_in_full(SYSTEMS, "aoe"))
def test_a_run_within_a_budget_is_the_same_run(tmp_path: Path, system: str, backend: str) -> None:
    options = model(system) | {"moe_backend": backend}
    start = make_start(options | ONE, tmp_path)
    for world, layouts in LAYOUTS.items():
        cases = {name: options | BUDGET | each for name, each in layouts.items()}
        assert differences(run_all(world, start, cases), start.on_one_rank) == {}
