"""The time constants of the states of a system, and the options that follow the run's length."""

import math
import re
from typing import Any

import pytest
import torch

from moe_parallel.config import BiasBalancing, make_config
from moe_parallel.config.selection.selection import TimeConstant
from moe_parallel.systems.top_p.rule import TopPController

BIAS = {"num_experts": 8, "moe_router_enable_expert_bias": True, "train_iters": 1000}
AOE = {"expert_selection": "aoe", "hidden_size": 128, "init_method_std": 0.02}


def steps(**options: Any) -> float:
    (found,) = make_config(BIAS | options).time_constants
    return found.steps


def test_steps_worked_by_hand() -> None:
    assert steps() == pytest.approx(0.6 / 1e-3)
    assert steps(moe_router_bias_update="id", moe_router_bias_update_rate=6e-3) == 100
    quantile = {"moe_router_bias_update": "quantile"}
    assert steps(**quantile) == 1
    assert steps(**quantile, moe_router_bias_ema=0.75) == 4
    # The norms of AoE have a spread of 0.02 sqrt(128 / 2) = 0.16 over the experts.
    assert steps(**AOE) == pytest.approx(8 * 0.16 / 1e-2)


def only_state(**options: Any) -> TimeConstant:
    (found,) = make_config({"num_experts": 8, "train_iters": 1000} | options).time_constants
    return found


@pytest.mark.parametrize("system", ["threshold", "aoe_threshold"])
def test_cutoffs(system: str) -> None:
    """None: 5% of the steps, but at least 10 of them."""
    own = {"expert_selection": system, "hidden_size": 128, "init_method_std": 0.02}
    assert only_state(**own).state == "cutoffs (quantile)"
    assert only_state(**own).steps == pytest.approx(50)
    assert only_state(**own, train_iters=100).steps == pytest.approx(10)
    assert only_state(**own, moe_threshold_ema=0.75).steps == 4
    assert only_state(**own, moe_threshold_ema=0).steps == 1
    # Logits have a spread of 0.02 sqrt(128) = 0.2263, norms of 0.02 sqrt(128 / 2) = 0.16.
    sign = own | {"moe_threshold_update": "sign", "moe_threshold_update_rate": 0.02}
    wanted = 400 * (0.2263 if system == "threshold" else 0.16)
    assert only_state(**sign).steps == pytest.approx(wanted, rel=1e-3)
    assert only_state(**sign).state == "cutoffs (sign)"


@pytest.mark.parametrize("norm_of", ["activation", "silu", "gate"])
@pytest.mark.parametrize("width", [64, 768])
def test_the_range_of_the_norms_of_routing_neurons(width: int, norm_of: str) -> None:
    """Eight times the spread over experts of the norms of random neurons."""
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(64, width, generator=generator)
    x_TD /= x_TD.square().mean(1, keepdim=True).sqrt()
    gate_TER, up_TER = (
        (x_TD @ (0.02 * torch.randn(width, 32 * 256, generator=generator))).view(64, 32, 256)
        for _ in range(2)
    )
    silu_TER = torch.nn.functional.silu(gate_TER)
    node_TER = {"activation": silu_TER * up_TER, "silu": silu_TER, "gate": gate_TER}[norm_of]
    spread = node_TER.norm(dim=2).std(dim=1).mean().item()
    own = {"expert_selection": "uoe", "hidden_size": width, "init_method_std": 0.02}
    found = steps(**own, uoe_norm_of=norm_of, moe_router_bias_update_rate=0.01)
    assert found == pytest.approx(8 * spread / 0.01, rel=0.08)


def test_coefficients_of_losses() -> None:
    """By default 1e-3 is 5% of the run away, or as far as it is from the paper's start."""
    relu = {"expert_selection": "relu"}
    assert only_state(**relu).steps == pytest.approx(50)
    assert only_state(**relu, train_iters=60_000).steps == pytest.approx(63.1, abs=0.1)
    # From 1e-5 to 1e-3 by 10: two steps, and as many from above.
    by_ten = relu | {"moe_relu_l1_coeff_multiplier": 10}
    assert only_state(**by_ten, moe_relu_l1_coeff_init=1e-5).steps == pytest.approx(2)
    assert only_state(**by_ten, moe_relu_l1_coeff_init=1e-1).steps == pytest.approx(2)
    free = {"expert_selection": "routing_free"}
    assert only_state(**free).steps == pytest.approx(50)
    assert only_state(**free, routing_free_coeff_init=1e-10).steps == pytest.approx(814, abs=0.5)


@pytest.mark.parametrize("system", ["top_p", "aoe_top_p"])
def test_a_controlled_p(system: str) -> None:
    own = {"expert_selection": system, "moe_top_p_target_experts": 2}
    assert only_state(**own).steps == pytest.approx(1.5 / 0.2)
    gains = {"moe_top_p_proportional_gain": 1, "moe_top_p_integral_gain": 0.01}
    assert only_state(**own, **gains).steps == pytest.approx(200)
    assert make_config({"num_experts": 8, "expert_selection": system}).time_constants == []


def test_the_time_of_p_is_that_of_its_controller() -> None:
    """With a slope of 1 and small gains, the error falls to 1 / e in that time."""
    gains = {"moe_top_p_proportional_gain": 0.5, "moe_top_p_integral_gain": 0.01}
    state = only_state(expert_selection="top_p", moe_top_p_target_experts=4, **gains)
    controller = TopPController(0.6, 4.0, 8, proportional_gain=0.5, integral_gain=0.01)
    errors = []
    for _ in range(20 + round(state.steps) + 1):
        mean_number = 8 * controller.setting.item()  # of equal probabilities
        errors.append(mean_number / 8 - 0.5)
        controller.move(torch.tensor([1000 * mean_number, 1000], dtype=torch.float64))
    # What the proportional part does at the start is over after 20 steps.
    assert errors[-1] / errors[20] == pytest.approx(math.exp(-1), rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"expert_selection": "threshold", "moe_threshold_ema": 0.999},
            r"cutoffs \(quantile\): time constant 1,000 steps, 1 of .* lower --moe-threshold-ema",
        ),
        (
            {"expert_selection": "relu", "moe_relu_l1_coeff_init": 1e-8, "train_iters": 200},
            r"L1 loss: time constant 63 steps, 0.32 of .* --moe-relu-l1-coeff-init \(now 1e-08\)",
        ),
        (
            {"expert_selection": "routing_free", "routing_free_coeff_init": 1e-10},
            r"loss: time constant 814 steps, 0.81 of .* --routing-free-coeff-init \(now 1e-10\)",
        ),
        (
            {
                "expert_selection": "top_p",
                "moe_top_p_target_experts": 2,
                "moe_top_p_integral_gain": 0.005,
            },
            "controlled p: time constant 300 steps, 0.3 of .* raise --moe-top-p-integral-gain",
        ),
    ],
)
def test_slow_states_are_warned(options: dict[str, Any], message: str) -> None:
    slow = make_config({"num_experts": 8, "train_iters": 1000} | options).warnings
    assert [bool(re.search(message, each)) for each in slow if "time constant" in each] == [True]


def rescaled(**options: Any) -> BiasBalancing:
    config = make_config(BIAS | options)
    found = config.selection.rescaled(config)
    assert isinstance(found, BiasBalancing)
    return found


def test_options_that_follow_the_length_of_the_run() -> None:
    """Of 1,000 steps: a rate that crosses the range in 250, and a memory of 50."""
    assert rescaled(moe_router_bias_update_rate=None).moe_router_bias_update_rate == 0.6 / 250
    aoe = rescaled(**AOE, moe_router_bias_update_rate=None)
    assert aoe.moe_router_bias_update_rate == pytest.approx(1.28 / 250)
    quantile = {"moe_router_bias_update": "quantile", "moe_router_bias_ema": None}
    assert rescaled(**quantile).moe_router_bias_ema == pytest.approx(0.98)
    assert rescaled(**quantile, train_iters=10).moe_router_bias_ema == 0
    assert rescaled() == make_config(BIAS).selection


def test_a_run_that_is_too_short_is_warned() -> None:
    (warning,) = make_config(BIAS).warnings
    assert warning == (
        "balancing bias (sign): time constant 600 steps, 0.6 of --train-iters 1000, which is above "
        "0.25: the run says little about it; raise --moe-router-bias-update-rate (none: by the "
        "length of the run), or train longer"
    )
    assert make_config(BIAS | {"train_iters": 2400}).warnings == []
    assert len(make_config(BIAS | {"train_iters": 2399}).warnings) == 1
    for length in (1, 7, 1000, 12345):
        for system in ({}, AOE):
            own = {"train_iters": length, "moe_router_bias_update_rate": None}
            assert make_config(BIAS | system | own).warnings == []
