"""Parameters of the built model, compared with closed formulas. test_papers.py has real sizes."""

from dataclasses import astuple
from typing import Any

import pytest
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.config import make_config
from moe_parallel.model import parameters
from moe_parallel.parallel import initialize_groups
from tests.distributed import run_distributed

VOCABULARY = 32_000
MOE: dict[str, Any] = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "ffn_hidden_size": 3072,
    "num_experts": 8,
}
DENSE = {**MOE, "num_experts": None}
AOE = {**MOE, "expert_selection": "aoe", "aoe_low_rank_size": 256}
GROUPED_QUERIES = {**MOE, "num_query_groups": 3, "moe_layer_freq": "[0]+[1]*11"}
EXPERT_CHOICE = {"expert_selection": "expert_choice", "moe_expert_choice_capacity_factor": 1.5}
SHARED = {"moe_shared_expert_intermediate_size": 512}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_load_balancing_type": "global_aux_loss"}

MODELS: dict[str, dict[str, Any]] = {
    "moe": MOE,
    "dense": DENSE,
    "untied": {**MOE, "untie_embeddings_and_output_weights": True},
    "padded vocabulary": {**MOE, "make_vocab_size_divisible_by": 1024},
    "narrow experts": {**MOE, "moe_ffn_hidden_size": 256, "moe_router_topk": 3},
    "grouped queries, first layer dense": GROUPED_QUERIES,
    "every third layer": {**MOE, "moe_layer_freq": "3"},
    "large router": {**MOE, "moe_router_hidden_size": 1012},
    "factorized W_g": {**MOE, "moe_gate_low_rank_size": 128},
    "shared expert": {**MOE, **SHARED},
    "gated shared expert": {**MOE, **SHARED, "moe_shared_expert_gate": True},
    "hash": {**MOE, "expert_selection": "hash"},
    "bias, and load of the step before": {**MOE, **BIAS},
    "expert choice": {**MOE, **EXPERT_CHOICE},
    "aoe": AOE,
    "aoe of a set width": {**AOE, "aoe_wide_size": 1000},
    "aoe, selected gradient": {**AOE, "aoe_gradient": "selected", "moe_aux_loss_coeff": 0},
    "aoe, bias": {**AOE, **BIAS},
    "aoe, shared expert": {**AOE, **SHARED},
    "aoe, grouped queries, first layer dense": {**AOE, **GROUPED_QUERIES},
    "aoe, expert choice": {**AOE, "expert_selection": "aoe_expert_choice"},
    "lory": {**MOE, "expert_selection": "lory"},
    "prefix routing": {**MOE, "expert_selection": "lory_prefix"},
    "smear": {**MOE, "expert_selection": "smear"},
    "segment expert choice": {**MOE, "expert_selection": "segment_expert_choice"},
    "corm": {**MOE, "expert_selection": "corm"},
    "uoe": {**MOE, "expert_selection": "uoe"},
    "uoe, narrow experts": {**MOE, "expert_selection": "uoe", "moe_ffn_hidden_size": 100},
}
#: The average number of experts that compute a token, by system and its options.
CHOSEN = {
    "topk": 2,
    "hash": 2,
    "expert_choice": 1.5,
    "aoe": 2,
    "aoe_expert_choice": 2,
    "corm": 2,
    "uoe": 2,
    "lory": 1,
    "lory_prefix": 1,
    "smear": 1,
    "segment_expert_choice": 1,
}

Count = tuple[int, int | None, int | None]


def count_all(
    models: dict[str, dict[str, Any]], experts_per_token: float | None = None
) -> dict[str, Count]:
    groups = initialize_groups(make_config({}).parallel)
    model_parallel_cuda_manual_seed(1)
    counts: dict[str, Count] = {}
    for name, options in models.items():
        config = make_config({**options, "moe_backend": "reference"})
        (model,) = parameters.model_without_storage(config, VOCABULARY, groups)
        assert {weight.device.type for weight in model.parameters()} == {"meta"}, name
        found = parameters.count_parameters(config, VOCABULARY, groups, experts_per_token)
        counts[name] = astuple(found)
    return counts


@pytest.fixture(scope="module")
def counts() -> dict[str, Count]:
    return run_distributed(1, count_all, MODELS)[0]


def closed_formula(options: dict[str, Any]) -> Count:
    """(total, active, active compute), from the sizes of the matrices in the papers."""
    get = options.get
    d, heads, layers = options["hidden_size"], options["num_attention_heads"], options["num_layers"]
    n, system = options["num_experts"], get("expert_selection", "topk")
    multiple = get("make_vocab_size_divisible_by", 1)
    rows = (VOCABULARY + multiple - 1) // multiple * multiple
    embeddings = rows * d * (2 if get("untie_embeddings_and_output_weights") else 1)
    keys = d * get("num_query_groups", heads) // heads
    attention = d * d + 2 * d * keys + d * d
    norms = 2 * d * layers + d
    moe_layers = {None: layers, "[0]+[1]*11": 11, "3": 4}[get("moe_layer_freq")] if n else 0
    dense = 3 * d * options["ffn_hidden_size"] * (layers - moe_layers)
    always = embeddings + norms + attention * layers + dense
    if not n:
        return always, always, always
    always += 3 * d * get("moe_shared_expert_intermediate_size", 0) * moe_layers
    always += (d if get("moe_shared_expert_gate") else 0) * moe_layers
    if not system.startswith(("aoe", "uoe")):
        hidden = get("moe_router_hidden_size")
        router = hidden * (d + n) if hidden else n * d
        if system == "corm":  # the key and the queries of the experts have 64 numbers
            router = 64 * d * (1 + n)
        always += router * moe_layers
    width = get("moe_ffn_hidden_size") or options["ffn_hidden_size"]
    low = get("aoe_low_rank_size") or get("moe_gate_low_rank_size")
    down, rest = 0, 3 * d * width
    if system == "uoe":  # the routing neurons of all experts compute a token
        routing = 3 * d * round(width / n)
        always, rest = always + n * routing * moe_layers, rest - routing
    if low:
        wide = get("aoe_wide_size") or round((3 * d * width - low * d) / (low + 2 * d))
        down, rest = d * low, low * wide + 2 * d * wide
    k = get("moe_router_topk", CHOSEN[system])
    computing = n if system.startswith("aoe") else k  # all experts of AoE compute x W_down
    total = always + n * (down + rest) * moe_layers
    active = always + round(k * (down + rest) * moe_layers)
    return total, active, always + round((computing * down + k * rest) * moe_layers)


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_the_closed_formula(counts: dict[str, Count], name: str) -> None:
    assert counts[name] == closed_formula(MODELS[name])


TOP_P = {**MOE, "expert_selection": "top_p"}
AOE_TOP_P = {**AOE, "expert_selection": "aoe_top_p"}


def test_what_only_training_tells_is_none() -> None:
    found = run_distributed(1, count_all, {"top_p": TOP_P, "aoe_top_p": AOE_TOP_P})[0]
    assert found["top_p"] == (closed_formula(MOE)[0], None, None)
    assert found["aoe_top_p"] == (closed_formula(AOE)[0], None, None)


@pytest.mark.parametrize("experts", [1, 2.5, 8])
def test_experts_per_token_can_be_given(experts: float) -> None:
    models = {"top_p": TOP_P, "aoe_top_p": AOE_TOP_P}
    found = run_distributed(1, count_all, models, experts)[0]
    assert found["top_p"] == closed_formula({**MOE, "moe_router_topk": experts})
    assert found["aoe_top_p"] == closed_formula({**AOE, "moe_router_topk": experts})


FREE = {"moe_zero_experts": 1, "moe_copy_experts": 2, "moe_constant_experts": 1}
#: Models with them, and the number of weights that they add to a layer.
WITH_FREE = {
    "moe": 4 * 768 + 3 * 768,
    "large router": 4 * 1012 + 3 * 768,
    "aoe": 4 + 3 * 768,
}


def test_free_experts_have_their_weights(counts: dict[str, Count]) -> None:
    models = {name: MODELS[name] | FREE for name in WITH_FREE}
    (built,) = run_distributed(1, count_all, models)
    for name, more in WITH_FREE.items():
        assert built[name][0] - counts[name][0] == 12 * more
