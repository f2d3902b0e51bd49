"""A run that continues with another kind of state names the option, both values and a remedy."""

from pathlib import Path
from typing import Any

import pytest

from moe_parallel.errors import InputError
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data

ONE_STEP = {"train_iters": 4, "exit_interval": 1}
BIAS = {"moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 0}
TOP_P: dict[str, Any] = {"expert_selection": "top_p"}

#: The options of a run, those with which it continues, the option, and both values.
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str, str, str]] = [
    (BIAS, {"moe_router_bias_update": "id"}, "--moe-router-bias-update", "sign", "id"),
    (
        BIAS | {"moe_router_bias_update": "id"},
        {"moe_router_bias_update": "quantile"},
        "--moe-router-bias-update",
        "id",
        "quantile",
    ),
    (
        {"expert_selection": "threshold"},
        {"moe_threshold_update": "sign"},
        "--moe-threshold-update",
        "quantile",
        "sign",
    ),
    (TOP_P, {"moe_top_p_target_experts": 2}, "--moe-top-p-target-experts", "None", "2.0"),
    (
        {},
        {"moe_router_load_balancing_type": "global_aux_loss"},
        "--moe-router-load-balancing-type",
        "aux_loss",
        "global_aux_loss",
    ),
]


def continued_here(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    messages = []
    for first, changes in cases:
        assert [code for code, _ in pretrain_here([first])] == [0]
        with pytest.raises(InputError) as caught:
            pretrain_here([first | changes | {"load": first["save"]}])
        messages.append(str(caught.value))
    return messages


@pytest.mark.full
def test_the_option_is_named(tmp_path: Path) -> None:
    options = SMALL | small_data(tmp_path) | ONE_STEP
    cases = [
        (options | first | {"save": tmp_path / str(number)}, changes)
        for number, (first, changes, *_) in enumerate(OTHERS)
    ]
    (messages,) = run_distributed(1, continued_here, cases)
    for number, (*_, name, before, now) in enumerate(OTHERS):
        message = messages[number]
        checkpoint = tmp_path / str(number) / "iter_0000001"
        start = f"--load {checkpoint}: {name} is {before} in the checkpoint and {now} here, which "
        assert message.startswith(start), message
        assert message.endswith("; use the values of its config.yaml, or load another checkpoint")
        assert "\n" not in message


@pytest.mark.full
def test_a_kind_that_keeps_the_same_numbers_may_change(tmp_path: Path) -> None:
    options = SMALL | small_data(tmp_path) | BIAS | ONE_STEP | {"save": tmp_path / "run"}
    continued = {"moe_router_bias_update": "quantile", "load": tmp_path / "run"}
    (ended,) = run_distributed(1, pretrain_here, [options, options | continued])
    assert [code for code, _ in ended] == [0, 0]
