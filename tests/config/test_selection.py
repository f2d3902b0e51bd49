"""Expert widths by Eq. 5 of the AoE paper, the names of the systems, and the initial W_up."""

from typing import Any

import pytest

from moe_parallel.config import (
    AutonomousSelection,
    RoutedSelection,
    aoe_wide_size,
    make_config,
)
from moe_parallel.config.config import selection_options
from moe_parallel.systems import SELECTIONS, ReLUSelection

SCALED = {"aoe_up_init_method": "scaled"}


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
    # The width is off by at most half a unit, so the cost by at most half the cost of a unit.
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


@pytest.mark.parametrize(
    ("options", "std"),
    [
        ({"expert_selection": "aoe", "aoe_low_rank_size": 64}, None),  # --init-method-std
        ({"expert_selection": "aoe", "aoe_low_rank_size": 64, **SCALED}, 0.125),
        ({"expert_selection": "aoe_top_p", "aoe_low_rank_size": 16, **SCALED}, 0.25),
        ({"expert_selection": "aoe_expert_choice", "aoe_low_rank_size": 4, **SCALED}, 0.5),
        ({"moe_gate_low_rank_size": 16, "moe_gate_up_init_method": "normal"}, None),
        ({"moe_gate_low_rank_size": 16, "moe_gate_up_init_method": "scaled"}, 0.25),
        ({}, None),
    ],
)
def test_how_w_up_starts(options: dict[str, Any], std: float | None) -> None:
    assert make_config(options).selection.up_std == std


RELU = {"expert_selection": "relu", "num_experts": 8}


@pytest.mark.parametrize(
    ("options", "initial"),
    [
        ({"train_iters": 200}, 1e-3 / 1.2**10),
        ({"train_iters": 60_000}, 1e-8),
        ({"train_iters": 200, "moe_relu_l1_coeff_multiplier": 2.0}, 1e-3 / 2**10),
    ],
)
def test_the_first_coefficient_of_relu_depends_on_the_run(
    options: dict[str, Any], initial: float
) -> None:
    config = make_config(RELU | options)
    selection = config.selection
    assert isinstance(selection, ReLUSelection)
    assert selection.initial_coefficient(config.training.train_iters) == pytest.approx(initial)
    (note,) = config.notes
    assert f"begins at {initial:.3g} in a run of {options['train_iters']} iterations" in note


def test_a_checkpoint_loads_whichever_way_its_weights_started() -> None:
    found = [
        option
        for known in selection_options().values()
        for option in known.values()
        if option.name.endswith("_init_method")
    ]
    families = (RoutedSelection, AutonomousSelection)
    assert len(found) == sum(issubclass(kind, families) for kind in SELECTIONS.values())
    assert not any(option.weights for option in found)  # not in a checkpoint's fingerprint
