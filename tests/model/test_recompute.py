"""Selective recomputation changes no bit of a step and keeps less for the backward pass."""

from itertools import chain
from typing import Any

import pytest

from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups
from tests import systems
from tests.distributed import run_distributed
from tests.model.small_gpt import SIZES, Options, build, micro_batches
from tests.plan.counting import Kept
from tests.tiers import rest_in_full

SHARED = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}
DENSE_TOO = {"moe_layer_freq": "[0]+[1]*3", "moe_input_jitter_eps": 0.1}
MODELS: dict[str, Options] = {
    "topk": systems.options("topk") | SHARED | DENSE_TOO,
    "aoe": systems.options("aoe") | {"attention_backend": "unfused", "moe_layer_freq": "[0]+[1]*3"},
    "smear": systems.options("smear") | {"smear_expert_dropout": 0.5},
}
MODULES = {
    "topk": ["core_attn", "layernorm", "mlp", "moe", "shared_experts"],
    "aoe": ["core_attn", "layernorm mlp", "moe", "core_attn layernorm mlp moe"],
    "smear": ["layernorm", "moe"],
}


def _steps(options: Options) -> dict[str, Any]:
    """Two steps: what they report, and the most bytes that autograd keeps."""
    config = make_config(SIZES | options)
    engine = build(config)
    others = chain(*((*c.module.parameters(), *c.module.buffers()) for c in engine.chunks))
    kept, most = Kept(others), 0

    def note(*_: Any) -> None:
        nonlocal most
        most = max(most, kept.nbytes)

    for chunk in engine.chunks:
        chunk.register_forward_hook(note)
    with kept.counting():
        results = [engine.step(micro_batches(config, 4 * step, engine)) for step in range(2)]
    layers = engine.statistics.training.reduced([None]).summaries()
    destroy_groups()
    return {"results": results, "layers": layers, "kept": most}


def _each(cases: dict[str, Options]) -> dict[str, dict[str, Any]]:
    return {name: _steps(options) for name, options in cases.items()}


@pytest.mark.parametrize("name", rest_in_full(MODELS, "topk"))
def test_the_same_bits_and_fewer_bytes(name: str) -> None:
    cases = {"nothing": MODELS[name]}
    for modules in MODULES[name]:
        cases[modules] = MODELS[name] | {
            "recompute_granularity": "selective",
            "recompute_modules": modules,
        }
    (found,) = run_distributed(1, _each, cases)
    plain = found.pop("nothing")
    for modules, again in found.items():
        assert again["results"] == plain["results"], modules
        assert again["layers"] == plain["layers"], modules
        assert again["kept"] < plain["kept"], modules
