"""A record flattened for TensorBoard and Weights & Biases."""

from moe_parallel.telemetry.scalars import scalars
from tests.telemetry.records import VALIDATION, example_record


def test_names_and_values():
    named = scalars(example_record(validation=VALIDATION))
    assert named["train/lm_loss"] == 4.25
    assert named["train/consumed_tokens"] == 81920
    assert named["validation/prose/bits_per_byte"] == 2.25
    assert named["ent_load/layer_02"] == 0.5
    assert named["tokens_dropped/layer_01"] == 1
    assert named["load/layer_01/expert_00"] == 0.75
    assert named["norm/layer_02/expert_01"] == 3
    assert "train/iteration" not in named


def test_what_only_some_systems_have():
    record = example_record()
    record["layers"][1] |= {"utilisation": 0.5, "routing_weight_per_expert": [0.25, 0.75]}
    record["layers"][0] |= {"z_loss": 4.0, "experts_per_token": 1.5}
    named = scalars(record)
    assert named["utilisation/layer_02"] == 0.5
    assert named["routing_weight/layer_02/expert_01"] == 0.75
    assert (named["z_loss/layer_01"], named["experts_per_token/layer_01"]) == (4.0, 1.5)
    assert "utilisation/layer_01" not in named and "z_loss/layer_02" not in named


def test_totals_are_means_of_entropies_and_sums_of_differences():
    named = scalars(example_record())
    assert named["routing/ent_load"] == 0.5
    assert named["routing/ent_conf"] == 0.25
    assert named["routing/max_minus_min_load"] == 1.0
    assert named["routing/tokens_dropped"] == 2


def test_a_dense_model_has_no_routing_and_nan_is_left_out():
    named = scalars({"iteration": 3, "lm_loss": float("nan"), "grad_norm": None, "aux_loss": 1})
    assert named == {"train/aux_loss": 1.0}
