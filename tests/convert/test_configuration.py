"""The configuration of a converted model, and the conversions that are rejected."""

import pytest

from moe_parallel.config import make_config
from moe_parallel.convert.configuration import converted_config, left_out
from moe_parallel.errors import InputError

SIZES = {"num_experts": 4, "moe_ffn_hidden_size": 48, "hidden_size": 32, "ffn_hidden_size": 64}


def topk(**options):
    return make_config(SIZES | options)


def test_what_both_systems_have_stays():
    source = topk(
        moe_router_topk=3,
        moe_aux_loss_coeff=0.02,
        data_path=["a", "b"],
        expert_model_parallel_size=2,
        bf16=True,
        save="old",
    )
    config = converted_config(source, "aoe", "new", ["--aoe-low-rank-size", "8", "--lr", "0.5"])
    selection = config.selection
    assert (selection.moe_router_topk, selection.moe_aux_loss_coeff) == (3, 0.02)
    assert (selection.aoe_low_rank_size, selection.aoe_gate) == (8, "selected")
    assert config.expert_width == source.expert_width == 48
    assert (config.model, config.moe, config.data) == (source.model, source.moe, source.data)
    assert (config.parallel, config.training) == (source.parallel, source.training)
    assert (config.optimizer.lr, config.checkpoint.save) == (0.5, "new")


@pytest.mark.parametrize(
    ("source", "gate"),
    [({}, "selected"), ({"moe_router_topk": 1}, "all"), ({"moe_router_pre_softmax": True}, "all")],
)
def test_norms_weigh_as_the_router_did(source, gate):
    source = topk(**source)
    assert converted_config(source, "aoe", "new", []).selection.aoe_gate == gate
    assert left_out(source, "aoe") == []


@pytest.mark.parametrize("system", ["lory", "lory_prefix"])
def test_merged_to_topk(system):
    source = topk(expert_selection=system)
    config = converted_config(source, "topk", "new", ["--moe-router-topk", "3"])
    assert (config.selection.moe_router_topk, config.expert_width) == (3, 48)


@pytest.mark.parametrize(
    ("source", "to", "flags", "message"),
    [
        ({"num_experts": None}, "aoe", [], "--to aoe takes a model of experts.*--load is dense"),
        ({"expert_selection": "aoe"}, "aoe", [], "of --expert-selection topk, but --load is aoe"),
        (
            {"moe_router_score_function": "sigmoid"},
            "aoe",
            [],
            "--to aoe does not support --moe-router-score-function sigmoid",
        ),
        (
            {"moe_router_enable_expert_bias": True},
            "aoe",
            [],
            "does not support --moe-router-enable-expert-bias True",
        ),
        ({}, "aoe", ["--hidden-size", "64"], "--hidden-size is 64, but 32 in --load"),
        ({}, "aoe", ["--aoe-wide-size", "50"], "--aoe-wide-size is 50, but .* width of 48"),
        ({}, "aoe", ["--moe-top-p", "0.4"], "--moe-top-p is 0.4, but it belongs to"),
    ],
)
def test_refused(source, to, flags, message):
    options = {name: value for name, value in (SIZES | source).items() if value is not None}
    with pytest.raises(InputError, match=message):
        converted_config(make_config(options), to, "new", flags)
