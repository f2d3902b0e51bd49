"""Initial weights depend only on the seed, not on the layout."""

import numpy
import pytest

from tests.distributed import run_distributed
from tests.model.small_gpt import Options, Weights, initial_weights, whole

SYSTEMS: dict[str, Options] = {
    "topk": {
        "moe_layer_freq": "[0]+[1]*3",
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "qk_layernorm_all_heads": True,
    },
    "aoe": {
        "expert_selection": "aoe",
        "aoe_low_rank_size": 8,
        "aoe_wide_size": 20,
        "untie_embeddings_and_output_weights": True,
    },
}
SYSTEMS["aoe, scaled"] = SYSTEMS["aoe"] | {"aoe_up_init_method": "scaled"}
SCALED = {("aoe, scaled", "experts.w_up_LRW"): 8**-0.5}  # standard deviations
LAYOUTS: dict[str, Options] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2, sp, ep2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2, virtual": {
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
    },
    "ep2": {"expert_model_parallel_size": 2},
    "etp2": {"expert_tensor_parallel_size": 2},
}


def weights(world: int, cases: list[Options]) -> list[Weights]:
    """The whole initial weights of each case."""
    return [whole(list(ranks)) for ranks in zip(*run_distributed(world, _each, cases), strict=True)]


def _each(cases):
    return [initial_weights(options) for options in cases]


@pytest.mark.parametrize("system", SYSTEMS)
def test_layouts_start_alike(system):
    options = SYSTEMS[system]
    (one,) = weights(1, [options])
    for name, found in zip(
        LAYOUTS, weights(2, [options | layout for layout in LAYOUTS.values()]), strict=True
    ):
        assert found.keys() == one.keys(), name
        for key, value in one.items():
            numpy.testing.assert_array_equal(found[key], value, err_msg=f"{key} under {name}")


@pytest.mark.parametrize("system", SYSTEMS)
def test_values(system):
    first, again, other = weights(1, [SYSTEMS[system] | {"seed": seed} for seed in (1, 1, 2)])
    for key, value in first.items():
        numpy.testing.assert_array_equal(again[key], value, err_msg=key)
        if value.ndim == 1:
            assert (value == (0 if key.endswith(".bias") else 1)).all(), f"{key} is a norm or bias"
            continue
        std = SCALED.get((system, key.partition(".mlp.")[2]), 0.1)
        assert abs(value.mean()) < 5 * std / value.size**0.5, key
        assert abs(value.std() - std) < 5 * std / (2 * value.size) ** 0.5, key
        # A normal variable exceeds two standard deviations with probability 0.0455.
        beyond = (abs(value) > 2 * std).mean()
        assert abs(beyond - 0.0455) < 5 * (0.0455 / value.size) ** 0.5, key
        assert abs(numpy.corrcoef(value.flat, other[key].flat)[0, 1]) < 5 / value.size**0.5, key


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_two_matrices_are_drawn_alike(system):
    (one,) = weights(1, [SYSTEMS[system]])
    matrices = {key: value for key, value in one.items() if value.ndim > 1}
    experts = {
        f"{key}.{i}": expert
        for key, value in matrices.items()
        for i, expert in enumerate(value if value.ndim > 2 else [value])
    }
    starts = {key: tuple(value.flatten()[:4]) for key, value in experts.items()}
    assert len(set(starts.values())) == len(starts)


def test_the_standard_deviation_is_an_option():
    narrow, wide = weights(1, [{"init_method_std": std} for std in (0.02, 0.1)])
    for key, value in narrow.items():
        if value.ndim > 1:
            numpy.testing.assert_allclose(5 * value, wide[key], rtol=1e-5, err_msg=key)


WIDTH, STD = 64, 0.02


def gate_std(weights: Weights) -> float:
    """The standard deviation of SiLU's input in low-rank experts: x W_down W_up, x with RMS 1."""
    (w_down,) = (value for key, value in weights.items() if key.endswith("w_down_EDR"))
    (w_up,) = (value for key, value in weights.items() if key.endswith("w_up_LRW"))
    x_TD = numpy.random.default_rng(0).normal(size=(500, WIDTH))
    x_TD /= numpy.sqrt((x_TD**2).mean(axis=1, keepdims=True))
    return float((x_TD @ w_down @ w_up).std())


@pytest.mark.parametrize("method", ["normal", "scaled"])
def test_the_gate_starts_as_large_as_w_g_makes_it_or_by_the_rank_smaller(method):
    """x W_g starts at s sqrt(d); the product of two such matrices starts at s^2 sqrt(d d_low)."""
    common = {"num_layers": 1, "hidden_size": WIDTH, "init_method_std": STD}
    cases = [
        (rank, {"expert_selection": "aoe", "aoe_low_rank_size": rank, "aoe_wide_size": 64})
        for rank in (8, 16, 32, 64, 128, 256)
    ]
    cases += [
        (32, {"expert_selection": system, "aoe_low_rank_size": 32, "aoe_wide_size": 64})
        for system in ("aoe_top_p", "aoe_expert_choice")
    ]
    cases = [(rank, options | {"aoe_up_init_method": method}) for rank, options in cases]
    factorized = {"moe_gate_low_rank_size": 16, "moe_gate_up_init_method": method}
    cases += [(16, factorized | {"moe_ffn_hidden_size": 64})]
    of_w_g = STD * WIDTH**0.5
    found = weights(1, [common | options for _, options in cases])
    for (rank, options), start in zip(cases, found, strict=True):
        wanted = of_w_g if method == "scaled" else of_w_g * STD * rank**0.5
        assert gate_std(start) == pytest.approx(wanted, rel=0.04), options


def test_how_w_up_starts_changes_no_other_weight():
    options = [SYSTEMS[system] for system in ("aoe", "aoe, scaled")]
    normal, scaled = weights(1, options)
    for key, value in normal.items():
        ratio = 8**-0.5 / 0.1 if key.endswith("w_up_LRW") else 1
        numpy.testing.assert_allclose(scaled[key], ratio * value, rtol=1e-6, err_msg=key)
