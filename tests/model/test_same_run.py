"""What is computed in another way, or is given, is the same run in every layout: experts in parts
within a budget, gradients added to main gradients, loads that are forced."""

from pathlib import Path
from typing import NamedTuple

import pytest
from megatron.core.utils import unwrap_model

from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups
from tests.distributed import run_distributed
from tests.model.comparison import differences, make_start, run_all
from tests.model.small_gpt import SIZES, Options, build, micro_batches
from tests.model.test_layouts import ONE, layout, model
from tests.tiers import rest_in_full

FUSED = {"gradient_accumulation_fusion": True}
FORCED = {"moe_router_force_routing": "zipf"}


class Way(NamedTuple):
    start: Options  # of the reference too
    also: Options  # of the runs that are compared with it
    systems: tuple[str, ...]


WAYS = {
    # About eight rows; a rank receives at least thirty.
    "budget": Way({}, {"moe_activation_budget": 0.01}, ("aoe", "topk", "aoe_top_p")),
    "forced": Way(FORCED, {}, ("aoe_top_p", "topk", "topk, sigmoid, groups, bias, shared expert")),
    "fused": Way({}, FUSED, ("topk", "aoe", "aoe_top_p", "lory")),
}
CASES = [(way, system) for way in WAYS for system in WAYS[way].systems]

#: Layouts by the number of ranks.
LAYOUTS: dict[int, dict[str, Options]] = {
    1: {"one": ONE, "one, recompute": layout(recompute=True)},
    2: {
        "ep2, distributed optimizer, recompute": layout(ep=2, distributed=True, recompute=True),
        "ep2, main gradients": layout(ep=2) | FUSED,
        "tp2, etp2": layout(tp=2, etp=2),
        "tp2, sp, ep2": layout(tp=2, ep=2, sp=True),
        "pp2, virtual, recompute": layout(pp=2, virtual=True, recompute=True),
    },
    4: {"ep2 in dp4, distributed optimizer": layout(ep=2, distributed=True)},
}


@pytest.mark.parametrize("world", rest_in_full(LAYOUTS, 2))
@pytest.mark.parametrize(
    ("way", "system"),
    [
        pytest.param(*case, marks=[] if case in (CASES[0], CASES[3]) else pytest.mark.full)
        for case in CASES
    ],
)
def test_it_is_the_same_run(tmp_path: Path, way: str, system: str, world: int) -> None:
    options = model(system) | WAYS[way].start
    begun = make_start(options | ONE, tmp_path)
    cases = {
        name: options | spread | WAYS[way].also
        for name, spread in LAYOUTS[world].items()
        if system != "lory" or spread["expert_model_parallel_size"] == 1
    }
    if cases:
        assert differences(run_all(world, begun, cases), begun.on_one_rank) == {}


SYSTEMS = WAYS["fused"].systems
WITH_DENSE = {"moe_layer_freq": "[0]+[1]*3"}
SHARED = {"topk": {"moe_shared_expert_intermediate_size": 16}}


def _added(cases: list[Options]) -> list[dict[str, bool]]:
    """By model, for each weight after a step: whether its gradient was added before the hook."""
    found = []
    for options in cases:
        config = make_config(SIZES | options)
        engine = build(config)
        engine.step(micro_batches(config, 0, engine))
        added = {
            name: weight.grad_added_to_main_grad
            for chunk in unwrap_model(engine.chunks)
            for name, weight in chunk.named_parameters()
        }
        destroy_groups()
        found.append(added)
    return found


@pytest.fixture(scope="module")
def added() -> dict[tuple[str, bool], dict[str, bool]]:
    """By system, and by whether the gradients are added."""
    keys = [(system, fused) for system in SYSTEMS for fused in (True, False)]
    cases = [
        model(system)
        | WITH_DENSE
        | SHARED.get(system, {})
        | {"gradient_accumulation_fusion": fused}
        for system, fused in keys
    ]
    (found,) = run_distributed(1, _added, cases)
    return dict(zip(keys, found, strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("system", SYSTEMS)
def test_weights_of_experts_linear_layers_and_the_head_are_those_that_are_added(
    added: dict[tuple[str, bool], dict[str, bool]], system: str, fused: bool
) -> None:
    of_weight = added[system, fused]
    is_untied = "output_layer.weight" in of_weight
    assert is_untied == model(system).get("untie_embeddings_and_output_weights", False)
    head = "output_layer.weight" if is_untied else "embedding.word_embeddings.weight"
    adds = {
        name: name == head
        or ".experts." in name
        or (".linear_" in name and name.endswith(".weight"))
        for name in of_weight
    }
    shared = [".dense.linear_fc1"] * (system in SHARED)
    for part in (head, ".experts.", ".mlp.linear_fc2", ".linear_qkv", *shared):
        assert any(part in name for name in adds), part
    assert of_weight == {name: fused and adds[name] for name in of_weight}
