"""Rejected and accepted configurations of experts in FP8."""

import pytest

from moe_parallel.config import make_config, validate
from moe_parallel.errors import InputError
from moe_parallel.training.run_folder import dense_twin

EXPERTS = {"num_experts": 4, "hidden_size": 64, "ffn_hidden_size": 128, "bf16": True}
FP8 = {**EXPERTS, "fp8_format": "hybrid"}
AOE = {"expert_selection": "aoe", "aoe_low_rank_size": 32, "aoe_wide_size": 112}

TAKEN = {
    "off": EXPERTS,
    "delayed": FP8,
    "the greatest": FP8 | {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"},
    "tensorwise, recomputed": FP8 | {"fp8_recipe": "tensorwise", "recompute_granularity": "full"},
    "blockwise": FP8 | {"fp8_recipe": "blockwise", "hidden_size": 128},
    "aoe": FP8 | AOE,
    "warm-up": FP8 | {"moe_dense_warmup_percent": 10.0},
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    validate(make_config(TAKEN[name]), world_size=1)


REFUSED = {
    "fp32": (FP8 | {"bf16": False}, "--fp8-format hybrid computes .* in bfloat16: set --bf16"),
    "dense": (
        {**FP8, "num_experts": None},
        "--fp8-format hybrid is for experts, but the model is dense: set --num-experts, or .*",
    ),
    "merged": (
        FP8 | {"expert_selection": "lory"},
        "--fp8-format hybrid .*, and --expert-selection lory merges its experts: remove one .*",
    ),
    "within a budget": (
        FP8 | {"moe_activation_budget": 8.0},
        "--fp8-format hybrid has no bound .*: remove --moe-activation-budget 8.0 or --fp8-format",
    ),
    "in parts": (
        FP8 | {"expert_model_parallel_size": 2, "moe_dispatch_parts": 2},
        "--fp8-format hybrid computes all .* at once: remove --moe-dispatch-parts 2 or --fp8-f.*",
    ),
    "recomputed": (
        FP8 | {"recompute_granularity": "full"},
        "--fp8-recipe delayed .* --recompute-granularity full .*: set --fp8-recipe tensorwise .*",
    ),
    "virtual stages": (
        FP8
        | {"fp8_amax_compute_algo": "max", "num_layers": 4}
        | {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
        "--fp8-amax-compute-algo max looks back .*: set --fp8-amax-compute-algo most_recent",
    ),
    "off": (
        EXPERTS | {"fp8_recipe": "blockwise"},
        "--fp8-recipe is blockwise, but FP8 is off: set --fp8-format",
    ),
    "another recipe": (
        FP8 | {"fp8_recipe": "tensorwise", "fp8_margin": 1},
        "--fp8-margin is 1, which only --fp8-recipe delayed has, not tensorwise: leave it out",
    ),
    "no history": (FP8 | {"fp8_amax_history_len": 0}, "--fp8-amax-history-len is 0: .* least 1"),
    "margin": (FP8 | {"fp8_margin": -1}, "--fp8-margin is -1: it must be at least 0"),
    "hidden": (
        FP8 | {"hidden_size": 72},
        "--hidden-size is 72, and --fp8-recipe delayed takes multiples of 16: change it",
    ),
    "width": (
        FP8 | {"moe_ffn_hidden_size": 100},
        "the experts' width over --expert-tensor-parallel-size 1 is 100, and .* of 16: "
        r"change --moe-ffn-hidden-size \(AoE: --aoe-wide-size\)",
    ),
    "Eq. 5": (FP8 | AOE | {"aoe_wide_size": None}, "the experts' width over .* is 141, .*"),
    "rank": (FP8 | AOE | {"aoe_low_rank_size": 8}, "--aoe-low-rank-size is 8, .*"),
    "factorized": (
        FP8 | {"moe_gate_low_rank_size": 8, "hidden_size": 16, "moe_ffn_hidden_size": 96},
        "--moe-gate-low-rank-size is 8, .*",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    given, message = REFUSED[name]
    with pytest.raises(InputError, match=f"^{message}$"):
        validate(make_config(given), world_size=2)


def test_the_dense_twin_is_in_bf16():
    twin = dense_twin(make_config(TAKEN["warm-up"]))
    validate(twin, world_size=1)
    assert twin.fp8.fp8_format is None and twin.training.bf16
