"""What a checkpoint must share with the configuration that loads it."""

from typing import Any

import pytest

from moe_parallel.config import make_config
from moe_parallel.training.run_folder import fingerprint
from tests.config.test_validate import AOE, VALID

ROUTING_FREE = AOE | {"expert_selection": "routing_free"}


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        (ROUTING_FREE, True),  # theta follows from it
        (ROUTING_FREE | {"routing_free_threshold": 0.5}, False),
        (AOE | {"moe_copy_experts": 2}, True),  # and the unit of the scores of free experts
        (AOE, False),
        ({"moe_copy_experts": 2}, False),
    ],
)
def test_initial_weights_matter_where_a_number_follows_from_them(
    options: dict[str, Any], shared: bool
) -> None:
    facts = fingerprint(make_config(VALID | options | {"init_method_std": 0.03}), 100, None)
    assert facts.get("--init-method-std") == (0.03 if shared else None)
