"""A run whose backward passes add to main gradients equals a run that adds gradients afterward."""

from pathlib import Path

import pytest
from megatron.core.utils import unwrap_model

from moe_parallel.config import make_config
from moe_parallel.ops import extension
from moe_parallel.parallel import destroy_groups
from tests.distributed import run_distributed
from tests.model.comparison import differences, make_start, run_all
from tests.model.small_gpt import SIZES, Options, build, micro_batches
from tests.model.test_layouts import ONE, layout, model

BACKENDS = ["reference"] + ["native"] * extension.is_built()
SYSTEMS = ["topk", "aoe", "aoe_top_p", "lory"]
WITH_DENSE = {"moe_layer_freq": "[0]+[1]*3"}
SHARED = {"topk": {"moe_shared_expert_intermediate_size": 16}}
FUSED = {"gradient_accumulation_fusion": True}

#: Layouts by the number of ranks.
LAYOUTS: dict[int, dict[str, Options]] = {
    1: {"one": ONE, "one, recompute": layout(recompute=True)},
    2: {
        "dp2, distributed optimizer": layout(distributed=True),
        "ep2, distributed optimizer, recompute": layout(ep=2, distributed=True, recompute=True),
        "tp2, etp2": layout(tp=2, etp=2),
        "tp2, ep2, sequence parallel": layout(tp=2, ep=2, sp=True),
        "pp2, virtual": layout(pp=2, virtual=True),
    },
    4: {"ep2 in dp4, distributed optimizer": layout(ep=2, distributed=True)},
}


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_fused_run_is_the_same_run(tmp_path: Path, system: str, backend: str) -> None:
    options = model(system) | {"moe_backend": backend}
    start = make_start(options | ONE, tmp_path)
    for world, layouts in LAYOUTS.items():
        cases = {
            name: options | FUSED | each
            for name, each in layouts.items()
            if system != "lory" or each.get("expert_model_parallel_size", 1) == 1
        }
        assert differences(run_all(world, start, cases), start.on_one_rank) == {}


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
