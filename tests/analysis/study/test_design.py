"""The section `study` of a study's file, and its terms: what is fitted, and what is measured."""

import dataclasses
import json

import pytest

from moe_parallel.analysis.study.contenders import SharedFile, choose_contenders
from moe_parallel.analysis.study.design import TERMS, StudyDesign
from moe_parallel.errors import InputError
from tests.analysis.study_folder import SHARED

WHOLE = {
    "selections": ["topk", "aoe", "small=aoe"],
    "seeds": {"default": 2, "topk": 5, "aoe": 4},
    "equal": "flops",
    "judged-by": "loss_after_first_part",
    "margin": 0.01,
    "lr-grid": ["1/3", 1, 3],
    "pilot-seed": 99,
    "balance-grid": {"aoe:moe-aux-loss-coeff": [0.001, 0.1]},
}


def test_a_section_is_read_and_survives_json():
    design = StudyDesign.from_raw(WHOLE)
    assert design.lr_grid == (1 / 3, 1.0, 3.0)
    assert (design.equal, design.margin, design.pilot_seed) == ("flops", 0.01, 99)
    assert [design.seeds_for(name) for name in ("topk", "aoe", "small")] == [5, 4, 2]
    again = StudyDesign.from_json(json.loads(json.dumps(dataclasses.asdict(design))))
    assert again == design and again.seeds_for("aoe") == 4
    assert StudyDesign.from_raw(None) == StudyDesign() and StudyDesign().seeds_for("any") == 3


NUMBER = "give a whole number of at least 1, or one by name"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"margins": 1}, "study: margins is not known; choose from selections, seeds"),
        ({"seeds": 0}, f"study: seeds is 0: {NUMBER}"),
        ({"seeds": {"default": True}}, rf"study: seeds is .*True.*: {NUMBER}"),
        ({"seeds": {"smear": 2}}, "seeds has smear, which selections does not name: choose from "),
        ({"seeds": {"aoe": 4}}, "seeds gives aoe 4 and the reference topk 3: a difference needs"),
        ({"margin": 0}, "study: margin is 0: give a number above 0"),
        ({"equal": "time"}, "study: equal is 'time': give one of experts, active, "),
        ({"lr-grid": [1]}, "two or more rising factors"),
        ({"lr-grid": [0.3, 3]}, "with 1: "),
        ({"lr-grid": [1, 2000]}, "from 1/1000 to 1000"),
        ({"selections": "topk"}, "give a list of names"),
        ({"balance-grid": {"aoe": [1]}}, "balance-grid is .*: give one option of each"),
        ({"balance-grid": {"dense:lr": [1]}}, "balance-grid has dense, which selections does not"),
        ({"lr-grid": [1, 3], "pilot-seed": 4}, "pilot-seed is 4, also the seed of a run"),
    ],
)
def test_wrong_values_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        StudyDesign.from_raw({**WHOLE, **changes}).check_seeds([3, 4, 5])


def test_what_belongs_together():
    without = {name: value for name, value in WHOLE.items() if name != "pilot-seed"}
    with pytest.raises(InputError, match="lr-grid and pilot-seed need each other"):
        StudyDesign.from_raw(without)
    with pytest.raises(InputError, match="holds no lines"):
        StudyDesign.from_raw([1])


def contenders(*words, **shared):
    return choose_contenders(words, SharedFile.from_raw({**SHARED, **shared}))


def linear(contender):
    """1,000 parameters outside the experts, 100 for each unit of their width; AoE has 300 more
    that compute for every token."""
    config = contender.config
    dense = contender.system == "dense"
    width = config.model.ffn_hidden_size if dense else config.moe.moe_ffn_hidden_size
    active = 1000 + (50 if dense else 100) * width
    more = 300 if contender.system == "aoe" else 0
    return {
        "active": active,
        "active_compute": active + more,
        "flops_per_token": 6 * (active + more),
    }


def test_widths_are_fitted_to_equal_active_parameters():
    """4,200 for topk (width 32) and 4,500 for aoe in the second reading: 29 is 3 units less."""
    topk, aoe = contenders("topk", "aoe")
    assert TERMS["active"].fit(aoe, topk, linear) == {}
    assert TERMS["active_compute"].fit(aoe, topk, linear) == {"moe_ffn_hidden_size": 29}
    topk, wide = contenders("topk", "dense", **{"dense:ffn_hidden_size": 100})
    assert TERMS["active"].fit(wide, topk, linear) == {"ffn_hidden_size": 64}


def test_a_width_that_does_not_exist_and_a_number_that_is_not_known():
    topk, aoe = contenders("topk", "aoe")

    def large(contender):
        return {"active": linear(contender)["active"] + (9000 if contender is not topk else 0)}

    with pytest.raises(InputError, match="contender aoe: no width of its experts gives it the 4,2"):
        TERMS["active"].fit(aoe, topk, large)
    with pytest.raises(InputError, match="contender aoe: training decides its experts per token"):
        TERMS["flops"].fit(aoe, topk, lambda c: {"flops_per_token": None if c is aoe else 1})


def test_iterations_are_fitted_to_equal_flops():
    """4,200 against 4,500: .9333 of the iterations, of the warm-up and of the decay."""
    topk, aoe = contenders("topk", "aoe", train_iters=300, lr_decay_iters=300, lr_warmup_iters=30)
    assert TERMS["flops"].fit(topk, topk, linear) == {}
    assert TERMS["flops"].fit(aoe, topk, linear) == {
        "train_iters": 280, "lr_warmup_iters": 28, "lr_decay_iters": 280
    }  # fmt: skip


def test_what_is_measured():
    topk, dense = contenders("topk", "dense")
    counts = {"active": 5, "active_compute": 6, "flops_per_token": 30}
    means = {"experts_per_token": 2.5, "consumed_tokens": 100.0, "tokens_per_second": 20.0}
    measured = {name: terms.value(topk, counts, means) for name, terms in TERMS.items()}
    assert measured == {"experts": 2.5, "active": 5, "active_compute": 6, "flops": 3000.0}
    assert TERMS["experts"].value(dense, counts, means) is None
    assert TERMS["flops"].value(topk, {}, means) is None
