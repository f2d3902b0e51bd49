"""The measures of a run and their spread, compared with values worked by hand."""

import math
from pathlib import Path

import pytest

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.study.measures import Spread, measures, paired_differences, spreads
from moe_parallel.analysis.study.results import StudyResults
from tests.analysis.study_folder import layer, make_study, write_cell


def training(iteration, loss, speed, layers):
    return {
        "iteration": iteration,
        "consumed_tokens": 128 * iteration,
        "lm_loss": loss,
        "tokens_per_second": speed,
        "layers": layers,
    }


def of(records) -> dict[str, float]:
    return measures(RunHistory.from_records(records))


def test_a_dense_run_has_losses_and_speed_alone():
    records = [training(1, 5.0, 900.0, []), training(2, 4.0, 1000.0, [])]
    records.append(
        {
            "iteration": 2,
            "consumed_tokens": 256,
            "validation": {"code": {"loss": 4.5, "bits_per_byte": 2.0, "layers": []}},
        }
    )
    assert of(records) == {
        "code/loss": 4.5,
        "code/bits_per_byte": 2.0,
        "train_loss": 4.0,  # the last of the two iterations
        "tokens_per_second": 1000.0,  # the first iteration is warm-up
        "consumed_tokens": 256,
    }


def test_speed_is_the_median_without_the_first_tenth():
    speeds = [1.0, 2.0, *range(100, 119)]  # 2 of 21 are skipped; the median of 19 is 109
    records = [training(i, 1.0, speed, []) for i, speed in enumerate(speeds, start=1)]
    assert of(records)["tokens_per_second"] == 109


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
    ],
    ids=["apart", "alike", "between"],
)
def test_mutual_information_of_expert_and_domain(counts, expected):
    assert of([evaluation(counts)])["mutual_information"] == pytest.approx(expected, abs=1e-12)


def test_one_domain_has_no_mutual_information():
    assert "mutual_information" not in of([evaluation({"a": [[1, 2]]})])


def test_experts_per_token_is_a_mean_over_layers_and_domains():
    records = [evaluation({"a": [[1, 1], [1, 1]], "b": [[1, 1], [1, 1]]}, experts_per_token=2.5)]
    records[0]["validation"]["b"]["layers"][1]["experts_per_token"] = 4.5
    assert of(records)["experts_per_token"] == 3.0


def test_other_losses_of_an_evaluation_are_taken_and_what_is_not_finite_is_left_out():
    records = [evaluation({"a": [[1, 1]]})]
    records[0]["validation"]["a"] |= {"loss_after_the_start": 0.75, "bits_per_byte": None}
    numbers = of(records)
    assert (numbers["a/loss"], numbers["a/loss_after_the_start"]) == (1.0, 0.75)
    assert "a/bits_per_byte" not in numbers


def test_spread_of_three_runs_and_of_one():
    spread = Spread.of([1.0, 2.0, 6.0])
    assert (spread.mean, spread.low, spread.high, spread.runs) == (3.0, 1.0, 6.0, 3)
    assert spread.deviation == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert Spread.of([2.0]) == Spread(2.0, None, 2.0, 2.0, 1)


def test_spreads_are_over_the_runs_that_have_a_measure():
    assert spreads([{"a": 1.0}, {"a": 3.0, "b": 5.0}])["b"] == Spread.of([5.0])


def test_differences_are_taken_seed_by_seed():
    reference = {1: {"x": 10.0}, 2: {"x": 20.0}, 3: {"x": 30.0}}
    runs = {1: {"x": 9.0}, 3: {"x": 32.0}, 4: {"x": 0.0}}
    assert paired_differences(runs, reference, "x") == Spread.of([-1.0, 2.0])
    assert paired_differences({4: {"x": 0.0}}, reference, "x") is None


def test_a_resumed_run_has_each_iteration_once_and_its_greatest_peak(tmp_path: Path):
    study = make_study(tmp_path / "study", ["topk"], seeds=[1])
    cell = study.cell("topk", 1)
    records = [training(20, 9.0, 5.0, []), training(20, 3.0, 5.0, []), training(40, 2.0, 6.0, [])]
    final = {"iteration": 40, "consumed_tokens": 1, "validation": {"code": {"loss": 2.0}}}
    for record, peak in zip(records, (100, 300, 200), strict=True):
        record["peak_memory_bytes"] = peak
    write_cell(cell, [*records, final])
    (result,) = StudyResults.read(study).results
    assert [r["lm_loss"] for r in result.runs[1].history.training] == [3.0, 2.0]
    assert result.measures[1]["peak_memory_bytes"] == 300
