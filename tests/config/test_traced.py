"""--moe-router-trace and --moe-router-replay: which systems have them, and with what."""

from typing import Any

import pytest

from moe_parallel.config import MergedSelection, make_config, validate
from moe_parallel.errors import InputError
from moe_parallel.systems import SELECTIONS

EXPERTS = {"num_experts": 4}


@pytest.mark.parametrize("system", SELECTIONS)
def test_systems_without_choices_are_refused(system: str) -> None:
    for name in ("moe_router_trace", "moe_router_replay"):
        options = EXPERTS | {"expert_selection": system, name: "trace"}
        if issubclass(SELECTIONS[system], MergedSelection):
            flag = f"--{name.replace('_', '-')}"
            words = f"{flag} is trace, but it belongs to --expert-selection topk or "
            with pytest.raises(InputError, match=words):
                make_config(options)
        else:
            validate(make_config(options), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"moe_router_force_routing": "zipf"},
            r"--moe-router-replay is r, but experts are forced \(zipf\): remove one of them",
        ),
        (
            {"moe_router_force_load_balancing": True},
            r"--moe-router-replay is r, but experts are forced \(in turn\): remove one",
        ),
        (
            {"moe_router_trace": "r"},
            "--moe-router-replay and --moe-router-trace are both r, so that the run would",
        ),
        (
            {"num_experts": None},
            "--moe-router-replay is 'r', but the model is dense: set --num-experts, or leave",
        ),
    ],
)
def test_what_excludes_a_replay(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate(make_config(EXPERTS | {"moe_router_replay": "r"} | options), 1)


def test_a_replay_says_so() -> None:
    (warning,) = make_config(EXPERTS | {"moe_router_replay": "r"}).warnings
    assert warning.startswith("experts are replayed from r: in training")
