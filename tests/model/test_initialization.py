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
