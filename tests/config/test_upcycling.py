"""The dense model from which experts start, and the configurations that are rejected for it."""

import pytest

from moe_parallel.config import make_config, validate
from moe_parallel.config.moe import dense_warmup_iters
from moe_parallel.errors import InputError
from moe_parallel.training.run_folder import dense_twin

EXPERTS = {"num_experts": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_layers": 2}
AOE = {"expert_selection": "aoe", "aoe_low_rank_size": 8}
WARM_UP = {"moe_dense_warmup_percent": 10.0}


@pytest.mark.parametrize(
    ("percent", "train_iters", "iterations"),
    [(0, 100, 0), (7, 100, 7), (5, 30, 2), (0.001, 100, 1), (28.9, 1000, 289), (50, 3, 2)],
)
def test_iterations_of_the_warm_up(percent, train_iters, iterations):
    given = {"moe_dense_warmup_percent": percent, "train_iters": train_iters}
    assert dense_warmup_iters(make_config(EXPERTS | given)) == iterations


@pytest.mark.parametrize("selection", [{}, AOE, {"moe_z_loss_coeff": 0.1}])
def test_the_twin_is_dense_and_as_wide_as_an_expert(selection):
    config = make_config(EXPERTS | WARM_UP | selection | {"moe_ffn_hidden_size": 40, "lr": 0.1})
    twin = dense_twin(config)
    plain = {"hidden_size": 32, "ffn_hidden_size": 40, "num_layers": 2, "lr": 0.1}
    assert twin == make_config(plain)
    validate(twin, world_size=1)


WRONG = {
    "above": ({"moe_dense_warmup_percent": 100.0}, ".* is 100.0: it must be below 100"),
    "below": ({"moe_dense_warmup_percent": -1.0}, ".* is -1.0: it must be at least 0"),
    "both": (
        WARM_UP | {"moe_use_upcycling": True},
        "--moe-use-upcycling converts .* at the start and --moe-dense-warmup-percent 10.0 later: "
        "remove one of them",
    ),
    "nothing left": (
        {"moe_dense_warmup_percent": 95.0, "train_iters": 10, "lr_warmup_iters": 1},
        "--moe-dense-warmup-percent 95.0 of --train-iters 10 leaves no iterations .*: lower it",
    ),
    "two widths": (
        WARM_UP | {"moe_layer_freq": "[0]+[1]", "moe_ffn_hidden_size": 32},
        r"--moe-layer-freq \[0\]\+\[1\] keeps dense layers of --ffn-hidden-size 48 next to experts "
        "of --moe-ffn-hidden-size 32, .*: make them equal",
    ),
    "narrow": (
        AOE | {"aoe_wide_size": 47, "moe_use_upcycling": True},
        "the experts' width .* is 47, below the 48 of the dense layers .*: set it to 48 or more.*",
    ),
    "dense model": (
        {"num_experts": None, "moe_use_upcycling": True},
        "--moe-use-upcycling is True, but the model is dense: set --num-experts, or .*",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options(wrong):
    options, line = WRONG[wrong]
    with pytest.raises(InputError, match=line):
        validate(make_config(EXPERTS | options), world_size=1)


def test_the_twin_is_divided_over_tensor_parallel_ranks():
    options = {
        "moe_ffn_hidden_size": 33,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    validate(make_config(EXPERTS | options), world_size=2)
    with pytest.raises(InputError, match="as wide as an expert, 33, which --tensor-model.* 2 does"):
        validate(make_config(EXPERTS | options | WARM_UP), world_size=2)
