"""What a run warns of before it trains."""

from typing import Any

import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.training.pretrain import _width_warnings

SIZES = {"num_experts": 4, "bf16": True, "hidden_size": 32, "ffn_hidden_size": 99}
AOE = {"expert_selection": "aoe", "aoe_low_rank_size": 8}
FACTORS = {"moe_gate_low_rank_size": 8}
PADS, CANNOT_READ = "each pass pads a copy of their weights", "tensor cores cannot read them"


@pytest.mark.parametrize(
    ("options", "width", "multiple", "told"),
    [
        ({"moe_ffn_hidden_size": 20}, 20, 8, f"{CANNOT_READ}, so they are several times slower"),
        (AOE | {"aoe_wide_size": 20}, 20, 8, f"{PADS}; --aoe-wide-size 16 needs none"),
        (AOE | {"aoe_wide_size": 5}, 5, 8, f"{PADS}; --aoe-wide-size 8 needs none"),
        # (3 d f - d_low d) / (d_low + 2 d) is 23.1 for f = 20, and 16.4 for f = 15.
        (FACTORS | {"moe_ffn_hidden_size": 20}, 23, 8, f"{PADS}; --moe-ffn-hidden-size 15 needs"),
        (FACTORS | {"moe_ffn_hidden_size": 4}, 2, 8, PADS),  # no smaller one fits
        (
            AOE | {"aoe_wide_size": 24, "expert_tensor_parallel_size": 2},
            24,
            16,
            f"{PADS}; --aoe-wide-size 16 needs none",
        ),
    ],
)
def test_experts_of_a_width_that_tensor_cores_cannot_read(
    options: dict[str, Any], width: int, multiple: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (warning,) = _width_warnings(make_config(SIZES | options))
    expected = f"experts are {width} wide, which is not a multiple of {multiple}: {told}"
    assert warning.startswith(expected)


def test_experts_of_a_fitting_width_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = make_config(SIZES | FACTORS | {"moe_ffn_hidden_size": 15})
    assert config.expert_width == 16 and not _width_warnings(config)
