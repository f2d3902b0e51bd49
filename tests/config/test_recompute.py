"""The modules of --recompute-granularity selective that a configuration may name."""

from typing import Any

import pytest

from moe_parallel.config import make_config, validate
from moe_parallel.errors import InputError

SELECTIVE = {"recompute_granularity": "selective"}
EXPERTS = {"num_experts": 4, "moe_layer_freq": "[0]+[1]*3"}
SHARED = {"moe_shared_expert_intermediate_size": 64}


def test_attention_is_the_default() -> None:
    def modules(**options: Any) -> set[str]:
        return set(make_config(options).training.recomputed_modules)

    assert modules(recompute_granularity="selective") == {"core_attn"}
    assert modules(recompute_granularity="selective", recompute_modules="moe mlp") == {"moe", "mlp"}
    assert modules(recompute_granularity="full") == modules() == set()


@pytest.mark.parametrize(
    ("options", "modules"),
    [
        (EXPERTS, "core_attn layernorm mlp moe"),
        (EXPERTS | SHARED, "shared_experts"),
        ({}, "mlp"),
        ({"num_experts": 4, "expert_selection": "lory", "lory_segment_length": 8}, "moe layernorm"),
    ],
)
def test_valid(options: dict[str, Any], modules: str) -> None:
    validate(make_config(options | SELECTIVE | {"recompute_modules": modules}), 1)


@pytest.mark.parametrize(
    ("options", "modules", "message"),
    [
        ({}, "moe_act", "--recompute-modules moe_act: the experts never keep .*; leave it out"),
        ({}, "mla_up_proj", "--recompute-modules mla_up_proj: .* no latent attention; leave it"),
        ({}, "attn", "--recompute-modules 'attn' is unknown: choose from core_attn, layernorm, .*"),
        ({}, "moe", "--recompute-modules moe .* the model is dense; leave it out"),
        ({"num_experts": 4}, "mlp", "--recompute-modules mlp .* all have experts; leave it out"),
        (EXPERTS, "shared_experts", ".* no shared expert; set --moe-shared-expert-intermediate"),
        (EXPERTS | SHARED, "moe shared_experts", ".* moe recomputes shared experts, too; leave"),
        (
            EXPERTS | SHARED | {"moe_shared_expert_overlap": True},
            "shared_experts",
            ".* --moe-shared-expert-overlap does; leave one of them out",
        ),
        ({"recompute_granularity": "full"}, "mlp", ".* which is full: set it to selective or .*"),
        ({"recompute_granularity": None}, "mlp", "--recompute-modules mlp .* which is none: .*"),
    ],
)
def test_refused(options: dict[str, Any], modules: str, message: str) -> None:
    config = make_config(SELECTIVE | options | {"recompute_modules": modules})
    with pytest.raises(InputError, match=message) as caught:
        validate(config, 1)
    assert str(caught.value).isprintable()
