"""The terms of a comparison: what is fitted before training, and what is measured after it."""

import pytest

from moe_parallel.analysis.study.contenders import SharedFile, choose_contenders
from moe_parallel.analysis.study.terms import TERMS, fitted_iterations
from moe_parallel.errors import InputError
from tests.analysis.study_folder import SHARED


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
