"""Loads with and without what balances them: a byte model of 3 layers, 8 experts, 2 per token.

Measured values, beside each threshold, are the extremes over three seeds and, where nothing else is
said, three layers: means of the last 50 of 250 steps. The ceiling of Ent_load and Ent_conf is
ln 8 = 2.079. 50 seconds of one core a seed.
"""

import pytest

from tests.slow.small_runs import AOE, SEEDS, Layers, last_fifth, train

pytestmark = pytest.mark.full

NO_LOSS = {"moe_aux_loss_coeff": 0.0}
BIAS = NO_LOSS | {"moe_router_enable_expert_bias": True}

# The biases move faster than by default: there are 250 steps, not 100,000.
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
    """Greatest by least mean norm of the experts of each layer."""
    return [max(layer["norm_per_expert"]) / min(layer["norm_per_expert"]) for layer in layers]


def confidence(layers: Layers) -> float:
    """Ent_conf, mean over layers: less where experts are surer."""
    return sum(layer["ent_conf"] for layer in layers) / len(layers)


@pytest.mark.parametrize("seed", SEEDS)
def test_balance(seed, tmp_path):
    steps = {"train_iters": 250}
    records = train(tmp_path, {name: steps | of for name, of in SYSTEMS.items()}, seed)
    runs = {name: last_fifth(each) for name, each in records.items()}

    # The loss on routing balances every layer; without, loads are uneven.
    assert min(loads(runs["topk"])) > 1.85  # 1.93
    assert min(loads(runs["aoe"])) > 1.85  # 1.97
    assert sum(loads(runs["topk, no loss"])) / 3 < 1.65  # 1.50; single layers 1.11 to 1.84
    assert max(loads(runs["aoe, no loss"])) < 1.6  # 1.43

    # So does the bias, without a loss.
    assert min(loads(runs["topk, bias"])) > 2.0  # 2.07
    assert min(loads(runs["aoe, bias"])) > 1.95  # 2.06

    # Norms of experts come apart without the loss.
    assert max(norm_ratios(runs["aoe"])) < 2.3  # 1.81
    assert min(norm_ratios(runs["aoe, no loss"])) > 3.0  # 3.70

    # Both balanced by the loss, experts that choose themselves are surer than a router.
    assert confidence(runs["aoe"]) < confidence(runs["topk"]) - 0.08  # 0.17 less
