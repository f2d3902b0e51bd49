"""Parameters counted on the built model, against closed formulas and against the papers.

The AoE paper's "732M with 247M active" is no single model: 732M is the total with tied embeddings,
247M what is active with untied ones (and for AoE without the down-projections of other experts).
Its 4B and 1.18B, and the dense 374M and 570M of the other papers, are all of untied embeddings.
"""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.config import make_config
from moe_parallel.model import parameters
from moe_parallel.parallel import initialize_groups
from tests.distributed import run_distributed

VOCABULARY = 32_000
UNTIED = {"untie_embeddings_and_output_weights": True}
SMALL = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "ffn_hidden_size": 3072,
    "num_experts": 8,
}
LARGE = {
    "num_layers": 24,
    "hidden_size": 1280,
    "num_attention_heads": 20,
    "ffn_hidden_size": 5120,
    "num_experts": 8,
}
DENSE_374 = {
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "ffn_hidden_size": 2816,
}
DENSE_570 = {
    "num_layers": 24,
    "hidden_size": 1280,
    "num_attention_heads": 20,
    "ffn_hidden_size": 3584,
}


def aoe(low: int, **more: Any) -> dict[str, Any]:
    return {"expert_selection": "aoe", "aoe_low_rank_size": low, **more}


AOE_LARGE = {**LARGE, **aoe(400, aoe_wide_size=6470)}
GROUPED_QUERIES = {**SMALL, "num_query_groups": 3, "moe_layer_freq": "[0]+[1]*11"}
NARROW_EXPERTS = {**SMALL, "moe_ffn_hidden_size": 256, "moe_router_topk": 3}
PADDED = {**SMALL, "make_vocab_size_divisible_by": 1024}

MODELS: dict[str, dict[str, Any]] = {
    "moe small": SMALL,
    "moe small untied": {**SMALL, **UNTIED},
    **{f"aoe {low}": {**SMALL, **aoe(low)} for low in (64, 128, 256, 512)},
    **{f"aoe {low} untied": {**SMALL, **aoe(low), **UNTIED} for low in (64, 128, 256, 512)},
    "moe 4b": {**LARGE, **UNTIED},
    "aoe 4b": {**AOE_LARGE, **UNTIED},
    "dense 374m": {**DENSE_374, **UNTIED},
    "dense 570m": {**DENSE_570, **UNTIED},
    "grouped queries, first layer dense": GROUPED_QUERIES,
    "aoe, grouped queries, first layer dense": {**GROUPED_QUERIES, **aoe(32)},
    "narrow experts": NARROW_EXPERTS,
    "padded vocabulary": PADDED,
}

Count = tuple[int, int, int]


def count_all(models: dict[str, dict[str, Any]]) -> dict[str, Count]:
    groups = initialize_groups(make_config({}).parallel)
    model_parallel_cuda_manual_seed(1)
    counts = {}
    for name, options in models.items():
        config = make_config({**options, "moe_backend": "reference"})
        (model,) = parameters._without_storage(config, VOCABULARY, groups)
        assert {weight.device.type for weight in model.parameters()} == {"meta"}, name
        found = parameters.count_parameters(config, VOCABULARY, groups)
        counts[name] = (found.total, found.active, found.active_compute)
    return counts


@pytest.fixture(scope="module")
def counts() -> dict[str, Count]:
    return run_distributed(1, count_all, MODELS)[0]


def closed_formula(
    *,
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    ffn_hidden_size: int,
    num_experts: int = 0,
    num_query_groups: int = 0,
    untie_embeddings_and_output_weights: bool = False,
    moe_ffn_hidden_size: int = 0,
    moe_router_topk: int = 2,
    moe_layer_freq: str = "",
    make_vocab_size_divisible_by: int = 1,
    expert_selection: str = "topk",
    aoe_low_rank_size: int = 0,
    aoe_wide_size: int = 0,
) -> Count:
    """(total, active, active compute), from the sizes of the matrices on paper."""
    d, n, k = hidden_size, num_experts, moe_router_topk
    dense_layers = 0 if n else num_layers
    if moe_layer_freq:
        dense_layers = 1
    multiple = make_vocab_size_divisible_by
    rows = (VOCABULARY + multiple - 1) // multiple * multiple
    embeddings = rows * d * (2 if untie_embeddings_and_output_weights else 1)
    heads = num_attention_heads
    keys = d * (num_query_groups or heads) // heads
    attention = d * d + 2 * d * keys + d * d
    norms = 2 * d * num_layers + d
    always = embeddings + norms + attention * num_layers + 3 * d * ffn_hidden_size * dense_layers
    if not n:
        return always, always, always
    routed = num_layers - dense_layers
    width = moe_ffn_hidden_size or ffn_hidden_size
    if expert_selection == "topk":
        router, expert = n * d * routed, 3 * d * width * routed
        return always + router + n * expert, *(2 * [always + router + k * expert])
    low = aoe_low_rank_size
    wide = aoe_wide_size or round((3 * d * width - low * d) / (low + 2 * d))
    down, rest = d * low * routed, (low * wide + 2 * d * wide) * routed
    return always + n * (down + rest), always + k * (down + rest), always + n * down + k * rest


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_the_closed_formula(counts: dict[str, Count], name: str) -> None:
    assert counts[name] == closed_formula(**MODELS[name])


def millions(parameters: int, digits: int = 0) -> float:
    return round(parameters / 1e6, digits)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("moe small", 732.46, 222.85),
        ("moe small untied", 757.03, 247.43),
        ("dense 374m", 373.9, 373.9),
        ("dense 570m", 569.6, 569.6),
        ("moe 4b", 4014, 1183),
    ],
)
def test_sizes_of_the_routed_and_the_dense_models(
    counts: dict[str, Count], name: str, total: float, active: float
) -> None:
    digits = len(str(total).partition(".")[2])
    assert millions(counts[name][0], digits) == total
    assert millions(counts[name][1], digits) == active
    assert counts[name][1] == counts[name][2]


@pytest.mark.parametrize(("low", "compute"), [(64, 251), (128, 254), (256, 262), (512, 276)])
def test_sizes_of_the_small_autonomous_models(
    counts: dict[str, Count], low: int, compute: float
) -> None:
    assert 732.3e6 <= counts[f"aoe {low}"][0] <= 732.4e6 + 5e4
    assert millions(counts[f"aoe {low} untied"][2]) == compute


def test_sizes_of_the_large_autonomous_model(counts: dict[str, Count]) -> None:
    total, active, compute = counts["aoe 4b"]
    assert (millions(total), millions(active), millions(compute)) == (4015, 1183, 1257)


@pytest.mark.parametrize("name", ["moe small", *(f"aoe {low}" for low in (64, 128, 256, 512))])
def test_the_papers_732m_is_tied_and_its_247m_untied(counts: dict[str, Count], name: str) -> None:
    assert millions(counts[name][0]) == 732
    assert millions(counts[f"{name} untied"][1]) == 247
    assert millions(counts[f"{name} untied"][0]) == 757
    assert millions(counts[name][1]) == 223


@pytest.mark.parametrize("name", ["moe 4b", "aoe 4b"])
def test_the_papers_4b_and_118b_are_untied(counts: dict[str, Count], name: str) -> None:
    assert round(counts[name][0] / 1e9) == 4
    assert round(counts[name][1] / 1e9, 2) == 1.18
    without_output_layer = counts[name][1] - VOCABULARY * 1280
    assert round(without_output_layer / 1e9, 2) == 1.14


def test_a_named_device_becomes_meta() -> None:
    with parameters._NamedDevicesAreMeta(), torch.device("meta"):
        assert torch.empty(1 << 50, device="cpu").is_meta
        assert torch.empty(1 << 50).is_meta
