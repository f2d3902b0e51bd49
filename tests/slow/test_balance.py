"""Loads with and without balancing: a byte model with 3 layers, 8 experts, 2 per token.

The measured values next to each threshold are the extremes over the seeds 1, 2 and 3, of which the
test runs the first, and, unless stated otherwise, over three layers. They are means of the last 50
of 250 steps. The ceiling of Ent_load and Ent_conf is ln 8 = 2.079.
"""

import pytest

from tests.slow.small_runs import AOE, Layers, last_fifth, train

pytestmark = pytest.mark.full

NO_LOSS = {"moe_aux_loss_coeff": 0.0}
BIAS = NO_LOSS | {"moe_router_enable_expert_bias": True}

# The biases move faster than by default, because there are 250 steps and not 100,000.
SYSTEMS = {
    "topk": {},
    "topk, no loss": NO_LOSS,
    "topk, bias": BIAS | {"moe_router_bias_update_rate": 1e-2},
    "aoe": AOE,
    "aoe, no loss": AOE | NO_LOSS,
    "aoe, bias": AOE | BIAS | {"aoe_gradient": "selected", "moe_router_bias_update_rate": 0.2},
}


def loads(layers: Layers) -> list[float]:
    return [layer["ent_load"] for layer in layers]


def norm_ratios(layers: Layers) -> list[float]:
    """The ratio of the largest to the smallest mean norm of an expert, for each layer."""
    return [max(layer["norm_per_expert"]) / min(layer["norm_per_expert"]) for layer in layers]


def confidence(layers: Layers) -> float:
    """Ent_conf, the mean over layers: smaller if experts are more confident."""
    return sum(layer["ent_conf"] for layer in layers) / len(layers)


def test_balance(tmp_path):
    steps = {"train_iters": 250}
    records = train(tmp_path, {name: steps | of for name, of in SYSTEMS.items()})
    runs = {name: last_fifth(each) for name, each in records.items()}

    # The auxiliary loss balances every layer; without it, loads are uneven.
    assert min(loads(runs["topk"])) > 1.85  # 1.93
    assert min(loads(runs["aoe"])) > 1.85  # 1.97
    # Of seeds 1 to 6: 1.66, 1.38 to 1.48. Rounding decides: the reference operators have 1.49 with
    # seed 1. Single layers 0.89 to 1.87.
    assert sum(loads(runs["topk, no loss"])) / 3 < 1.75
    assert max(loads(runs["aoe, no loss"])) < 1.6  # 1.43

    # The bias balances too, without a loss.
    assert min(loads(runs["topk, bias"])) > 2.0  # 2.07
    assert min(loads(runs["aoe, bias"])) > 1.85  # 2.06; 1.94 on a processor that rounds differently

    # Without the loss, the norms of the experts diverge.
    assert max(norm_ratios(runs["aoe"])) < 2.3  # 1.81
    assert min(norm_ratios(runs["aoe, no loss"])) > 3.0  # 3.70

    # Both balanced by the loss, autonomous experts are more confident than a router.
    assert confidence(runs["aoe"]) < confidence(runs["topk"]) - 0.08  # 0.17 less
