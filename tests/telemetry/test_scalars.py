"""A record as scalars for TensorBoard and Weights & Biases."""

import pytest

from moe_parallel.telemetry.scalars import histograms, scalars
from tests.telemetry.records import VALIDATION, example_record


def test_names_and_values():
    named = scalars(example_record(validation=VALIDATION))
    assert named["train/lm_loss"] == 4.25
    assert named["train/consumed_tokens"] == 81920
    assert named["validation/prose/bits_per_byte"] == 2.25
    assert named["moe/layer_02/ent_load"] == 0.5
    assert named["moe/layer_01/tokens_dropped"] == 1
    assert named["moe/layer_01/imbalance"] == 1.5  # 6 of 8 choices; an even load would be 4
    assert "train/iteration" not in named


def test_the_machine():
    named = scalars(example_record(machine={"mfu": 0.5, "gpu_watts": None}))
    assert named["machine/mfu"] == 0.5
    assert not {"train/machine", "machine/gpu_watts"} & named.keys()


def test_what_only_some_systems_have():
    record = example_record()
    record["layers"][1] |= {"utilisation": 0.5, "routing_weight_per_expert": [0.25, 0.75]}
    record["layers"][0] |= {"z_loss": 4.0, "experts_per_token": 1.5}
    named = scalars(record)
    assert named["moe/layer_02/utilisation"] == 0.5
    assert (named["moe/layer_01/z_loss"], named["moe/layer_01/experts_per_token"]) == (4.0, 1.5)
    assert "moe/layer_01/utilisation" not in named and "moe/layer_02/z_loss" not in named
    by_expert = histograms(record)
    assert by_expert["moe/layer_02/routing_weight"] == [0.25, 0.75]
    assert "moe/layer_01/routing_weight" not in by_expert


def test_totals_are_means_of_entropies_and_sums_of_differences():
    record = example_record()
    record["layers"][1]["tokens_per_expert"] = [4, 4]
    named = scalars(record)
    assert named["moe/ent_load"] == 0.5
    assert named["moe/ent_conf"] == 0.25
    assert named["moe/max_minus_min_load"] == 1.0
    assert named["moe/tokens_dropped"] == 2
    assert (named["moe/imbalance_mean"], named["moe/imbalance_max"]) == (1.25, 1.5)


def test_charts_do_not_grow_with_the_experts():
    """24 layers of 64 experts: numbers per layer, and one distribution over a layer's experts."""
    layer = example_record()["layers"][0]
    wide = {"tokens_per_expert": list(range(64)), "norm_per_expert": [1.0] * 64}
    record = example_record(layers=[layer | wide | {"layer": n} for n in range(1, 25)])
    by_expert = histograms(record)
    assert len(by_expert) == 24 * 2 and len(scalars(record)) < 24 * 12
    loads = by_expert["moe/layer_24/load"]
    assert len(loads) == 64 and sum(loads) == pytest.approx(64)
    assert loads[63] == pytest.approx(63 / 31.5)


def test_what_is_not_finite_is_left_out_of_distributions():
    record = example_record()
    record["layers"][0]["norm_per_expert"] = [float("nan"), 2.0]
    record["layers"][1]["norm_per_expert"] = [None, None]
    by_expert = histograms(record)
    assert by_expert["moe/layer_01/norm"] == [2.0]
    assert "moe/layer_02/norm" not in by_expert


def test_a_dense_model_has_no_routing_and_nan_is_left_out():
    named = scalars({"iteration": 3, "lm_loss": float("nan"), "grad_norm": None, "aux_loss": 1})
    assert named == {"train/aux_loss": 1.0}
