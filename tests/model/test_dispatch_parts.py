"""--moe-dispatch-parts changes only rounding: losses and gradient norms are those of one part."""

from pathlib import Path
from typing import Any

import pytest

from tests import systems
from tests.distributed import run_distributed
from tests.systems import SYSTEMS
from tests.tiers import rest_in_full
from tests.training.tiny_run import GATHERED, OVERLAP, Layout, TinyRun

Options = dict[str, Any]

EP2, NATIVE = Layout(2, ep=2), {"moe_backend": "native"}
FUSED = {"gradient_accumulation_fusion": True}
DROPPING = {"moe_expert_capacity_factor": 0.75}
EIGHT = {"num_experts": 8}

#: Parts, the layout, and options of a run.
CASES: dict[str, tuple[int, Layout, Options]] = {
    **{f"{name}, ep2": (2, EP2, systems.options(name)) for name in SYSTEMS},
    "four parts, top 4": (4, EP2, EIGHT | {"moe_router_topk": 4}),
    "two experts in a part": (2, EP2, EIGHT),
    "aoe, two experts in a part": (2, EP2, EIGHT | systems.options("aoe") | FUSED),
    "etp2": (4, Layout(2, etp=2), {}),
    "aoe, etp2, fused": (2, Layout(2, etp=2), systems.options("aoe") | FUSED),
    "aoe, gathered, etp2": (2, Layout(2, etp=2), GATHERED),
    "aoe, gathered": (2, EP2, GATHERED),
    "fused, overlapped": (2, Layout(2, ep=2, distributed=True), FUSED | OVERLAP),
    "capacity": (2, EP2, DROPPING),
    "capacity, padded": (2, EP2, DROPPING | {"moe_pad_expert_input_to_capacity": True}),
    "recomputed": (2, EP2, {"recompute_granularity": "full"}),
    "aoe, experts recomputed": (
        2,
        EP2,
        systems.options("aoe") | {"recompute_granularity": "selective", "recompute_modules": "moe"},
    ),
    "bf16, fused": (2, EP2, {"bf16": True} | FUSED),
    "aoe, bf16": (2, EP2, {"bf16": True} | systems.options("aoe")),
    "shared expert aside": (
        2,
        EP2,
        {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True},
    ),
    "tp2, sp, ep2": (2, Layout(2, tp=2, ep=2), {}),
}
for merging in filter(systems.merges, SYSTEMS):
    del CASES[f"{merging}, ep2"]

QUICK = (
    "four parts, top 4",
    "aoe, two experts in a part",
    "topk, large router, factorized W_g, global loss, ep2",
)


def _both(cases: dict[str, tuple[int, Layout, Options]], path: Path) -> dict[str, Any]:
    """Two steps of each case, in one part and in several."""
    found = {}
    for name, (parts, layout, options) in cases.items():
        runs = []
        for number in (1, parts):
            chosen = NATIVE | options | {"moe_dispatch_parts": number}
            run = TinyRun(layout, path, options=chosen)
            runs.append(run.steps(2))
            run.close()
        found[name] = runs
    return found


OTHERS = [name for name in CASES if name not in QUICK]
GROUPS = [QUICK, *(tuple(OTHERS[first : first + 6]) for first in range(0, len(OTHERS), 6))]


@pytest.mark.parametrize("names", rest_in_full(GROUPS, QUICK), ids=lambda names: names[0])
def test_parts_change_nothing_but_rounding(names: tuple[str, ...], tmp_path: Path) -> None:
    cases = {name: CASES[name] for name in names}
    for found in run_distributed(2, _both, cases, tmp_path, timeout=300):
        for name, (whole, divided) in found.items():
            within = 1e-2 if "bf16" in name else 1e-5
            for expected, seen in zip(whole, divided, strict=True):
                assert seen == pytest.approx(expected, rel=within), name


@pytest.mark.full
def test_parts_within_a_budget(tmp_path: Path) -> None:
    """Each part is computed in parts of its own; sums over them differ by rounding."""
    within = NATIVE | {"moe_activation_budget": 0.01}
    cases = {"topk": (2, EP2, within), "aoe": (2, EP2, systems.options("aoe") | within)}
    for found in run_distributed(2, _both, cases, tmp_path):
        for name, (whole, divided) in found.items():
            for expected, seen in zip(whole, divided, strict=True):
                assert seen == pytest.approx(expected, rel=1e-5), name
