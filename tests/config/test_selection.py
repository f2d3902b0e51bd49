"""Widths of experts: Eq. 5 of the AoE paper, and which option decides."""

from typing import Any

import pytest

from moe_parallel.config import SELECTIONS, Selection, aoe_wide_size, make_config, selection_name


@pytest.mark.parametrize(
    ("d", "d_ffn", "d_low", "exact"),
    [
        (768, 3072, 64, 4392.96),
        (768, 3072, 128, 4194.46),
        (768, 3072, 256, 3840),
        (768, 3072, 512, 3264),
        (1280, 5120, 400, 6469.19),  # the paper prints 6470
    ],
)
def test_eq_5(d: int, d_ffn: int, d_low: int, exact: float) -> None:
    assert aoe_wide_size(d, d_ffn, d_low) == round(exact)
    # Half a unit of width off at most, so at most half of what a unit of width costs.
    swiglu = 3 * d * d_ffn
    autonomous = d_low * d + aoe_wide_size(d, d_ffn, d_low) * (d_low + 2 * d)
    assert abs(autonomous - swiglu) <= (d_low + 2 * d) / 2


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({}, 3072),
        ({"moe_ffn_hidden_size": 512}, 512),
        ({"expert_selection": "aoe", "aoe_low_rank_size": 256}, 3840),
        ({"expert_selection": "aoe", "aoe_low_rank_size": 256, "aoe_wide_size": 100}, 100),
        ({"expert_selection": "aoe", "aoe_low_rank_size": 256, "moe_ffn_hidden_size": 1024}, 1207),
    ],
)
def test_width_of_an_expert(options: dict[str, Any], width: int) -> None:
    config = make_config({"hidden_size": 768, "ffn_hidden_size": 3072, **options})
    assert config.expert_width == width


@pytest.mark.parametrize(("name", "kind"), SELECTIONS.items())
def test_one_word_names_a_system(name: str, kind: type[Selection]) -> None:
    config = make_config({"expert_selection": name})
    assert type(config.selection) is kind
    assert selection_name(config.selection) == name
