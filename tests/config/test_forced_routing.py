"""The forms of --moe-router-force-routing, and the systems that it is for."""

from typing import Any

import pytest

from moe_parallel.config import TokensChoose, make_config, validate
from moe_parallel.config.forced_routing import ForcedRouting, parse_forced_routing
from moe_parallel.errors import InputError
from moe_parallel.systems import SELECTIONS

EXPERTS = {"num_experts": 4}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("balanced", ForcedRouting("balanced")),
        ("hot", ForcedRouting("hot", 0.5)),
        ("hot:1", ForcedRouting("hot", 1)),
        ("zipf:1.2", ForcedRouting("zipf", 1.2)),
    ],
)
def test_a_workload_is_read(text: str, expected: ForcedRouting) -> None:
    assert parse_forced_routing(text) == expected
    validate(make_config(EXPERTS | {"moe_router_force_routing": text}), 1)


FORCED = "--moe-router-force-routing"
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"moe_router_force_routing": text}, f"{FORCED} {message}")
    for text, message in [
        ("hott", "is 'hott': it takes balanced, hot:SHARE or zipf:EXPONENT"),
        ("hot:1.01", "hot is 1.01: it must be at most 1"),
        ("hot:0", "hot is 0: it must be above 0"),
        ("hot:", "is 'hot:': hot takes a number, as in hot:0.5"),
        ("zipf:10.5", "zipf is 10.5: it must be at most 10"),
        ("zipf:nan", "is 'zipf:nan': zipf takes a number, as in zipf:1.0"),
    ]
]
BROKEN += [
    (
        {"moe_router_force_routing": "zipf", "moe_router_force_load_balancing": True},
        f"--moe-router-force-load-balancing .* {FORCED} zipf differently: remove one of them",
    ),
    (
        {"num_experts": None, "moe_router_force_routing": "zipf"},
        f"{FORCED} is 'zipf', but the model is dense: set --num-experts, or leave the flag out",
    ),
]


@pytest.mark.parametrize(("options", "message"), BROKEN)
def test_a_wrong_workload_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        validate(make_config(EXPERTS | options), 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("system", SELECTIONS)
def test_it_is_for_systems_in_which_tokens_choose(system: str) -> None:
    options = EXPERTS | {"expert_selection": system, "moe_router_force_routing": "hot"}
    if issubclass(SELECTIONS[system], TokensChoose):
        assert make_config(options).selection.forced_routing == "hot"
    else:
        with pytest.raises(
            InputError, match=f"{FORCED} is .*, but it belongs to .* and {system} is selected"
        ):
            make_config(options)


def test_a_forced_run_says_so() -> None:
    (warning,) = make_config(EXPERTS | {"moe_router_force_routing": "hot:0.9"}).warnings
    assert warning.startswith("experts are forced (hot:0.9)")
    (warning,) = make_config(EXPERTS | {"moe_router_force_load_balancing": True}).warnings
    assert warning.startswith("experts are forced (in turn)")
