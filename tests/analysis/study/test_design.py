"""The section `study` of a study's file, and its terms: what is fitted, and what is measured."""

import dataclasses
import json

import pytest

from moe_parallel.analysis.study.contenders import SharedFile, choose_contenders
from moe_parallel.analysis.study.design import TERMS, StudyDesign, fitted_iterations
from moe_parallel.errors import InputError
from tests.analysis.study_folder import SHARED

WHOLE = {
    "selections": ["topk", "aoe", "small=aoe"],
    "pairs": [["small", "aoe"]],
    "seeds": 5,
    "equal": "flops",
    "judged-by": "loss_after_first_part",
    "margin": 0.01,
    "lr-grid": ["1/3", 1, 3],
    "pilot-seed": 99,
}


def test_a_section_is_read_and_survives_json():
    design = StudyDesign.from_raw(WHOLE)
    assert design.lr_grid == (1 / 3, 1.0, 3.0)
    assert design.pairs == (("small", "aoe"),)
    assert (design.equal, design.margin, design.pilot_seed) == ("flops", 0.01, 99)
    content = json.loads(json.dumps(dataclasses.asdict(design)))
    again = StudyDesign.from_json(content)
    assert again == design and again.difference_from(design) is None
    assert StudyDesign.from_raw(None) == StudyDesign()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"margins": 1}, "study: margins is not known; choose from selections, seeds"),
        ({"seeds": 0}, "study: seeds is 0: it must be a whole number of at least 1"),
        ({"seeds": {"default": 0}}, "study: seeds: default is 0: it must be a whole number of at"),
        ({"seeds": {"smear": 2}}, "seeds has smear, which selections does not name: choose from "),
        ({"seeds": {"aoe": 4}}, "seeds gives aoe 4 and the reference topk 3: a difference needs"),
        ({"selections": [], "seeds": {"aoe": 2}}, "seeds has aoe, which selections does not name"),
        ({"margin": 0}, "study: margin has 0: it must be a number above 0"),
        ({"margin": True}, "study: margin has True: it must be"),
        ({"margin": "x"}, "study: margin has 'x', which is not a number"),
        ({"equal": "loss"}, "study: equal is 'loss': choose from experts, active, "),
        ({"lr-grid": [1]}, "at least two factors"),
        ({"lr-grid": [1, 0.3]}, "rising factors, 1 among them"),
        ({"lr-grid": [0.3, 3]}, "rising factors, 1 among them"),
        ({"lr-grid": ["1/0", 1]}, "has '1/0', which is not a number"),
        ({"lr-grid": [1, 2000]}, "choose from 1/1000 to 1000"),
        ({"selections": "topk"}, "give a list of names"),
        ({"pilot-seed": None}, "pilot-seed is None"),
        (
            {"pairs": ["aoe"]},
            r"study: pairs is \['aoe'\]: give pairs of names, such as \[\[a, b\]\]",
        ),
        ({"pairs": [["aoe", "smear"]]}, "pairs has smear, which selections does not name: choose"),
        ({"pairs": [["aoe", "topk"]]}, r"pairs has \[aoe, topk\]: give two contenders, neither of"),
        ({"pairs": [["small", "aoe"], ["aoe", "small"]]}, "pairs names two contenders twice"),
        ({"pairs": [["aoe", "aoe"]]}, r"pairs has \[aoe, aoe\]: give two contenders"),
    ],
)
def test_wrong_values_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        StudyDesign.from_raw({**WHOLE, **changes})


def test_each_contender_may_have_its_own_number_of_seeds():
    selections = ["topk", "aoe", "small=topk", "dense"]
    numbers = {"default": 2, "topk": 5, "aoe": 5}
    design = StudyDesign.from_raw({"selections": selections, "seeds": numbers})
    names = ("topk", "aoe", "small", "dense")
    assert [design.seeds_for(name) for name in names] == [5, 5, 2, 2]
    content = json.loads(json.dumps(dataclasses.asdict(design)))
    assert StudyDesign.from_json(content).seeds_for("aoe") == 5
    without = StudyDesign.from_raw({"selections": ["topk", "aoe"], "seeds": {"aoe": 1}})
    assert (without.seeds_for("topk"), without.seeds_for("aoe")) == (3, 1)


def test_what_belongs_together():
    without = {name: value for name, value in WHOLE.items() if name != "pilot-seed"}
    with pytest.raises(InputError, match="lr-grid and pilot-seed need each other"):
        StudyDesign.from_raw(without)
    untested = {name: value for name, value in WHOLE.items() if name != "margin"}
    with pytest.raises(InputError, match="pairs needs margin, without which nothing is tested"):
        StudyDesign.from_raw(untested)
    with pytest.raises(InputError, match="equal: time needs lr-grid"):
        StudyDesign.from_raw({"equal": "time"})
    with pytest.raises(InputError, match="holds no lines"):
        StudyDesign.from_raw([1])
    with pytest.raises(InputError, match="pilot-seed is 99, also the seed"):
        StudyDesign.from_raw(WHOLE).check_seeds([98, 99])


def test_a_margin_cannot_be_changed_after_the_first_run_but_seeds_can():
    earlier = StudyDesign.from_raw(WHOLE)
    more = StudyDesign.from_raw(
        {**WHOLE, "seeds": 9, "selections": [*WHOLE["selections"], "dense"]}
    )
    assert more.difference_from(earlier) is None
    wider = StudyDesign.from_raw({**WHOLE, "margin": 0.02})
    assert wider.difference_from(earlier) == ("margin", 0.01, 0.02)


def contenders(*words, **shared):
    return choose_contenders(words, SharedFile.from_raw({**SHARED, **shared}), {})


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
    assert fitted_iterations(aoe, 1.009) == {}


def test_what_is_measured():
    topk, dense = contenders("topk", "dense")
    counts = {"active": 5, "active_compute": 6, "flops_per_token": 30}
    means = {"experts_per_token": 2.5, "consumed_tokens": 100.0, "tokens_per_second": 20.0}
    measured = {name: terms.value(topk, counts, means) for name, terms in TERMS.items()}
    assert measured == {
        "experts": 2.5, "active": 5, "active_compute": 6, "flops": 3000.0, "time": 5.0
    }  # fmt: skip
    assert TERMS["experts"].value(dense, counts, means) is None
    assert TERMS["flops"].value(topk, {}, means) is None
