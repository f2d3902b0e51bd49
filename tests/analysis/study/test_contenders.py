"""The contenders: an option of a shared file applies to each contender that has the option."""

import pytest

from moe_parallel.analysis.study.contenders import SharedFile, choose_contenders
from moe_parallel.errors import InputError
from moe_parallel.systems import AoESelection, TopKSelection
from tests.analysis.study_folder import SHARED


def choose(words, **shared):
    file = SharedFile.from_raw({**SHARED, **shared})
    return {c.name: c for c in choose_contenders(words, file)}


def test_an_option_that_one_system_has_goes_to_it_alone():
    chosen = choose(["topk", "aoe"], moe_router_topk=1)
    topk, aoe = chosen["topk"].config, chosen["aoe"].config
    assert isinstance(topk.selection, TopKSelection) and isinstance(aoe.selection, AoESelection)
    assert (topk.selection.moe_router_topk, aoe.selection.moe_router_topk) == (1, 1)
    assert aoe.selection.aoe_low_rank_size == 8
    assert "aoe_low_rank_size" not in chosen["topk"].options
    assert topk.model == aoe.model and topk.training == aoe.training


def test_a_variant_has_a_name_and_options_of_its_own():
    chosen = choose(
        ["topk", "switch=topk"],
        **{"switch:moe_aux_loss_coeff": 0.1, "switch:moe_router_topk": 1, "switch:lr": "1e-3"},
        **{"aoe:lr": 0.5},
    )
    assert list(chosen) == ["topk", "switch"]  # aoe is not asked for
    switch = chosen["switch"]
    assert switch.system == "topk"
    assert switch.config.selection == TopKSelection(moe_router_topk=1, moe_aux_loss_coeff=0.1)
    assert switch.config.optimizer.lr == 1e-3
    assert chosen["topk"].config.selection == TopKSelection()


def test_the_dense_contender_is_as_wide_as_the_experts_of_a_token():
    dense = choose(["dense"], moe_router_topk=3, moe_expert_capacity_factor=2.0)["dense"].config
    assert dense.moe.num_experts is None
    assert dense.model.ffn_hidden_size == 3 * 32
    shared = choose(["dense"], moe_router_topk=2, moe_shared_expert_intermediate_size=48)
    assert shared["dense"].config.model.ffn_hidden_size == 2 * 32 + 48
    own = choose(["dense"], **{"dense:ffn_hidden_size": 40})["dense"].config
    assert own.model.ffn_hidden_size == 40


def test_a_file_has_lines_for_all_contenders_of_its_design():
    file = SharedFile.from_raw({**SHARED, "variant:lr": 1e-3})
    with pytest.raises(InputError, match="a line for variant, which is not a contender"):
        choose_contenders(["topk"], file)
    (topk,) = choose_contenders(["topk"], file, ["topk", "variant=aoe"])
    assert topk.alone == {}


@pytest.mark.parametrize(
    ("words", "shared", "message"),
    [
        (["topq"], {}, "--selections names topq: choose from topk, .*dense"),
        (["a/b=topk"], {}, "a name has up to 40"),
        (["topk", "topk"], {}, "names topk twice: .*topk2=topk"),
        (
            ["topk"],
            {"topk:aoe_gate": "all"},
            "contender topk: --aoe-gate is all, but it belongs to .*aoe",
        ),
        (["topk"], {"topk:lrr": 1}, "contender topk: --lrr is not a flag.*--lr"),
        (["topk"], {"topk:train_iters": 9}, "--train-iters cannot be set for topk alone"),
        (["topk"], {"topq:lr": 1}, "--config has a line for topq, which is not a contender"),
        (["topk"], {"load": "runs/x"}, "--config sets --load"),
        (["topk"], {"num_experts": None}, "contender topk: --num-experts is not set"),
        (["dense"], {"moe_layer_freq": 2}, "contender dense: .*--moe-layer-freq 2"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(words, shared, message):
    with pytest.raises(InputError, match=message) as refused:
        choose(words, **shared)
    assert "\n" not in str(refused.value)
