"""The measures of a run, their spread, and the tests of differences, worked by hand."""

import math

import pytest

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.study.measures import (
    PairedTest,
    Spread,
    half_width,
    holm,
    measures,
    paired_differences,
    spreads,
)
from tests.analysis.study_folder import layer


def training(iteration, loss, speed, layers, **more):
    return {
        "iteration": iteration,
        "consumed_tokens": 128 * iteration,
        "lm_loss": loss,
        "tokens_per_second": speed,
        "layers": layers,
        **more,
    }


def evaluation(counts_by_domain, **more):
    return {
        "iteration": 2,
        "consumed_tokens": 256,
        "validation": {
            name: {
                "loss": 1.0,
                "layers": [layer(i, c, **more) for i, c in enumerate(counts, start=1)],
            }
            for name, counts in counts_by_domain.items()
        },
    }


def of(records) -> dict[str, float]:
    return measures(RunHistory.from_records(records))


def test_a_dense_run_has_losses_speed_and_its_greatest_peak():
    """Iteration 2 is there twice, as after a resumption; the last counts."""
    peaks = {"peak_memory_bytes": 300}, {"peak_memory_bytes": 200}
    records = [training(1, 5.0, 900.0, [], **peaks[0]), training(2, 9.0, 1.0, [])]
    records.append(training(2, 4.0, 1000.0, [], **peaks[1]))
    validation = {"loss": 4.5, "bits_per_byte": None, "loss_after_the_start": 0.75, "layers": []}
    records.append({"iteration": 2, "consumed_tokens": 256, "validation": {"code": validation}})
    assert of(records) == {
        "code/loss": 4.5,
        "code/loss_after_the_start": 0.75,
        "train_loss": 4.0,  # the last of the two iterations
        "tokens_per_second": 1000.0,  # the first iteration is warm-up
        "consumed_tokens": 256,
        "peak_memory_bytes": 300,
    }


def test_the_end_is_the_last_tenth():
    """The last two of 20 iterations: Ent_load of [1, 1] and [1, 0] in either layer, and so on."""
    early = [training(i, 9.0, 1.0, [layer(1, [9, 1]), layer(2, [9, 1])]) for i in range(1, 19)]
    late = [
        training(19, 3.0, 1.0, [layer(1, [5, 5]), layer(2, [5, 5], ent_conf=0.4)]),
        training(20, 2.0, 1.0, [layer(1, [10, 0]), layer(2, [5, 5], tokens_dropped=4)]),
    ]
    numbers = of(early + late)
    assert numbers["train_loss"] == 2.5
    assert numbers["ent_load"] == pytest.approx(3 / 4 * math.log(2))
    assert numbers["ent_conf"] == pytest.approx((1 + 0.4 + 1 + 1) / 4)
    assert numbers["max_minus_min_load_sum"] == pytest.approx((0 + 1) / 2)
    assert numbers["dropped_share"] == pytest.approx(4 / (20 * 2 * 10))
    assert "utilisation" not in numbers and "experts_per_token" not in numbers


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        # Each domain has its own experts in one of two layers: (ln 2 + 0) / 2. The sizes of the
        # domains do not matter.
        ({"a": [[7, 0], [1, 1]], "b": [[0, 900], [5, 5]]}, math.log(2) / 2),
        ({"a": [[2, 6]], "b": [[10, 30]]}, 0.0),
        # p(e|a) = (1, 0), p(e|b) = (1/2, 1/2), p(e) = (3/4, 1/4):
        # (ln 4/3 + (ln 2/3 + ln 2) / 2) / 2
        (
            {"a": [[4, 0]], "b": [[3, 3]]},
            (math.log(4 / 3) + (math.log(2 / 3) + math.log(2)) / 2) / 2,
        ),
        ({"a": [[1, 2]]}, None),
    ],
    ids=["apart", "alike", "between", "one domain"],
)
def test_mutual_information_of_expert_and_domain(counts, expected):
    found = of([evaluation(counts)]).get("mutual_information")
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_experts_per_token_is_a_mean_over_layers_and_domains():
    records = [evaluation({"a": [[1, 1], [1, 1]], "b": [[1, 1], [1, 1]]}, experts_per_token=2.5)]
    records[0]["validation"]["b"]["layers"][1]["experts_per_token"] = 4.5
    assert of(records)["experts_per_token"] == 3.0


def test_spreads_over_the_runs_that_have_a_measure_and_differences_by_seed():
    spread = Spread.of([1.0, 2.0, 6.0])
    assert (spread.mean, spread.low, spread.high, spread.runs) == (3.0, 1.0, 6.0, 3)
    assert spread.deviation == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert spreads([{"a": 1.0}, {"a": 3.0, "b": 5.0}])["b"] == Spread(5.0, None, 5.0, 5.0, 1)
    reference = {1: {"x": 10.0}, 2: {"x": 20.0}, 3: {"x": 30.0}}
    runs = {1: {"x": 9.0}, 3: {"x": 32.0}, 4: {"x": 0.0}}
    assert paired_differences(runs, reference, "x") == Spread.of([-1.0, 2.0])
    assert paired_differences({4: {"x": 0.0}}, reference, "x") is None


def test_an_interval_of_three_differences():
    """Mean 2, deviation 1, so the standard error is 1/sqrt(3). t_.975 = 4.30265 and t_.95 =
    2.91999 with two degrees of freedom, from any printed table."""
    test = PairedTest.of([1.0, 2.0, 3.0], margin=1.0)
    assert (test.mean, test.deviation, test.runs) == (2.0, 1.0, 3)
    assert (test.low, test.high) == pytest.approx((2 - 2.48413, 2 + 2.48413), abs=1e-4)
    assert (test.low_90, test.high_90) == pytest.approx((2 - 1.68585, 2 + 1.68585), abs=1e-4)
    for runs, factor in [(3, 1.69), (5, 0.95), (10, 0.58)]:  # as the literature prints them
        assert half_width(runs, 0.90) == pytest.approx(factor, abs=0.005)


def test_p_values_of_two_differences_are_those_of_cauchy():
    """With one degree of freedom P(t >= x) = 1/2 - atan(x)/pi. Mean 2, standard error 1."""
    test = PairedTest.of([1.0, 3.0], margin=0.5)

    def tail(x: float) -> float:
        return 0.5 - math.atan(x) / math.pi

    assert test.p == pytest.approx(2 * tail(2.0))
    assert test.p_beyond == pytest.approx(2 * tail(1.5))
    assert test.p_equivalent == pytest.approx(tail(-1.5))
    assert PairedTest.of([-3.0, -1.0], margin=0.5).p == pytest.approx(test.p)


def test_equivalence_is_decided_by_the_90_percent_interval():
    """At a margin that the interval just touches p is .05, whichever side it touches."""
    differences = [0.001, 0.004, -0.002, 0.003, 0.0015]
    reach = PairedTest.of(differences, margin=1.0).high_90
    for each in (differences, [-one for one in differences]):
        assert PairedTest.of(each, reach).p_equivalent == pytest.approx(0.05)
        assert PairedTest.of(each, reach * 1.001).is_equivalent
        assert not PairedTest.of(each, reach * 0.999).is_equivalent
    undecided = PairedTest.of([0.2, -0.1, 0.05], margin=0.01)
    assert undecided.p > 0.05 and not undecided.is_equivalent


@pytest.mark.parametrize(
    ("value", "p", "p_beyond", "p_equivalent"),
    [(0.0, 1.0, 1.0, 0.0), (0.5, 0.0, 1.0, 0.0), (2.0, 0.0, 0.0, 1.0)],
)
def test_without_any_spread_the_mean_decides(value, p, p_beyond, p_equivalent):
    test = PairedTest.of([value, value], margin=1.0)
    assert (test.p, test.p_beyond, test.p_equivalent) == (p, p_beyond, p_equivalent)
    assert test.low == test.high == value


def test_holm():
    """Three times .01; two times .03; .04 is raised to the .06 before it."""
    corrected = holm({"b": 0.04, "a": 0.01, "c": 0.03})
    assert list(corrected) == ["b", "a", "c"]
    assert corrected == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}
