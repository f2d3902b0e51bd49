"""Who is compared, what the tests say in words, and the sections of the page."""

from pathlib import Path

import pytest

from moe_parallel.analysis.study.folder import StudyFolder
from moe_parallel.analysis.study.report import markdown, write_study_report
from moe_parallel.analysis.study.results import Comparisons, StudyResults
from tests.analysis.study_folder import layer, make_study, write_cell

SEEDS = (1, 2, 3, 4, 5)
DESIGN = {"margin": 0.01}
EVEN = (0.0, 0.001, -0.001, 0.002, -0.002)  # mean 0, deviation .00158


def records(loss: float, experts: float = 2.0, tokens: int = 5120):
    place = {"iteration": 40, "consumed_tokens": tokens}
    layers = [layer(1, [1, 1], experts_per_token=experts)]
    text = {"loss": loss, "loss_after_first_part": loss - 0.5, "layers": layers}
    other = {**text, "loss": loss + 1}
    return [
        {**place, "lm_loss": loss, "tokens_per_second": 100.0, "layers": layers},
        {**place, "validation": {"code": text, "prose": other}},
    ]


def study(path: Path, offsets, design=DESIGN, shared=None, **runs) -> StudyResults:
    """`offsets`: of each contender's loss from 4 + seed, by seed, or one for all. `runs`: further
    arguments of `records` by system."""
    folder = make_study(path / "study", list(offsets), seeds=SEEDS, design=design, shared=shared)
    for name, its in offsets.items():
        values = its if isinstance(its, tuple) else [its + each for each in EVEN]
        for seed, offset in zip(SEEDS, values, strict=False):
            more = runs.get(name.rpartition("=")[2], {})
            cell = folder.cell(name.partition("=")[0], seed)
            write_cell(cell, records(4 + seed + offset, **more))
    return StudyResults.read(folder)


def of(*arguments, **runs) -> Comparisons:
    comparisons = Comparisons.of(study(*arguments, **runs))
    assert comparisons is not None
    return comparisons


def test_verdicts(tmp_path: Path):
    """Offsets of the reference are 0, so differences have the deviation of EVEN, and a 95%
    interval is +-.00196."""
    wide = (0.02, -0.02, 0.03, -0.03, 0.0)
    offsets = {"topk": (0.0,) * 5, "a=topk": 0.0, "b=topk": -0.03, "c=topk": 0.005, "d=topk": wide}
    offsets |= {"e=topk": 0.0105}
    found = of(tmp_path, offsets)
    assert {name: each.verdict for name, each in found.compared.items()} == {
        "a": "equivalent",
        "b": "better by more than the margin",
        "c": "worse by less than the margin",
        "d": "not decided",
        "e": "worse",
    }
    first, b = found.compared["a"].test, found.compared["b"]
    assert (first.low, first.high) == pytest.approx((-0.00196, 0.00196), abs=1e-5)
    assert b.p == pytest.approx(5 * b.test.p)  # the smallest of five
    assert b.p_beyond == pytest.approx(5 * b.test.p_beyond)


REASONS = {
    "another number of experts": (
        {"topk": 0.0, "aoe": 0.0},
        {"aoe": {"experts": 2.1}},
        DESIGN,
        ("aoe", "it uses 2.100 experts per token on held-out text, 5.0% above the 2 of its"),
    ),
    "later tokens": (
        {"topk": 0.0, "smear": 0.0},
        {},
        DESIGN,
        ("smear", "its loss depends on later tokens, so it is not the likelihood of the text"),
    ),
    "segments": (
        {"topk": 0.0, "lory": 0.0},
        {"lory": {"experts": 1.0}},
        DESIGN,
        ("lory", "its loss on the first 16 tokens of a sequence depends on later tokens; judged-"),
    ),
    "other FLOPs": (
        {"topk": 0.0, "aoe": 0.0},
        {"aoe": {"tokens": 5700}},
        {**DESIGN, "equal": "flops"},
        ("aoe", "its FLOPs of training are 3.42e+04, 11.3% above those of topk"),
    ),
    "a reference without a likelihood": (
        {"smear": 0.0, "topk": 0.0},
        {},
        DESIGN,
        ("topk", "smear, with which it would be compared, is itself only reported"),
    ),
    "a single seed": (
        {"topk": 0.0, "aoe": (0.1,)},
        {},
        DESIGN,
        ("aoe", "it and topk have fewer than two finished seeds in common"),
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_who_is_reported_only(tmp_path: Path, case: str):
    offsets, runs, design, (name, reason) = REASONS[case]
    shared = {"lory_segment_length": 16, "eval_first_part": 16}
    path = tmp_path / "s"
    path.mkdir()
    results = study(path, offsets, design, shared, **runs)
    if design.get("equal"):
        for result in results.results:
            result.parameters["flops_per_token"] = 6
    found = Comparisons.of(results)
    assert found is not None and name not in found.compared
    assert found.only_reported[name].startswith(reason)


def test_a_loss_after_the_first_part_makes_segments_comparable(tmp_path: Path):
    design = {**DESIGN, "judged-by": "loss_after_first_part", "equal": "active"}
    shared = {"lory_segment_length": 16, "eval_first_part": 16}
    found = of(tmp_path, {"topk": 0.0, "lory": 0.0}, design, shared, lory={"experts": 1.0})
    assert found.compared["lory"].verdict == "equivalent" and not found.only_reported


def test_the_page_says_it_in_words(tmp_path: Path):
    """c has three seeds: 0.01 above .000, .001, -.001, of deviation .001; a 95% interval of three
    is 4.303 / sqrt(3) = 2.48 deviations."""
    short = (0.01, 0.011, 0.009)
    offsets = {"topk": (0.0,) * 5, "a=topk": 0.0, "b=topk": -0.03, "c=topk": short, "smear": 0.0}
    page = markdown(study(tmp_path, offsets))
    for sentence in (
        "Mean ± standard deviation over 3 to 5 seeds (lowest",
        "| a | +0.0000 | −0.0020 to +0.0020 | −0.0015 to +0.0015 | 0.0016 | 5 | 1 | ",
        " | equivalent |\n",
        "| b | −0.0300 | −0.0320 to −0.0280 |",
        " | better by more than the margin |",
        "| c | +0.0100 | +0.0075 to +0.0125 | +0.0083 to +0.0117 | 0.0010 | 3 |",
        "| c | +0.010 ± 0.001 (+0.009 to +0.011) | +0.010 ± 0.001 (+0.009 to +0.011) | 3 |",
        "**smear** is reported, not compared: its loss depends on later tokens",
        "With 3 seeds a 95% interval is ±2.48 and a 90% interval ±1.69 standard deviations",
        "With 5 seeds a 95% interval is ±1.24 and a 90% interval ±0.95 standard deviations",
        "differences below 0.0020 cannot be distinguished from 0, and no margin below 0.0015 can "
        "be met. 2 of 2 differences could meet the margin of 0.01",
        "with the same seed. Differences are tested at 0.05, with Holm's correction for 3 tests",
        "| b | 2 | 100.0% | yes |",
        "| smear | 2 | 100.0% | no |",
    ):
        assert sentence in page


def test_without_a_margin_nothing_is_tested(tmp_path: Path):
    results = study(tmp_path, {"topk": 0.0, "aoe": 0.0}, {})
    assert Comparisons.of(results) is None
    assert "What the numbers show" not in markdown(results)


def test_the_whole_grid_is_on_the_page(tmp_path: Path):
    design = {"margin": 0.01, "lr-grid": ["1/3", 1, 3], "pilot-seed": 9}
    shared = {"lr": 3e-3, "min_lr": 3e-4}
    folder = make_study(
        tmp_path / "study", ["topk", "aoe"], seeds=[1], design=design, shared=shared
    )
    _pilots(folder, "topk", {0.001: 4.2, 0.003: 4.0, 0.009: 4.1, 0.005196: 3.95})
    _pilots(folder, "aoe", {0.001: 4.2, 0.003: 4.1, 0.009: None, 0.001732: 4.05})
    for cell in folder.cells({"topk": [1], "aoe": [1]}):
        write_cell(cell, records(4.0))
    page = write_study_report(folder).read_text()
    # Losses are means of `code` and `prose`, which is 1 above.
    assert "| topk | 4.7000 | 4.5000 | 4.6000 | **4.4500** at 0.005196 | 0.005196 |" in page
    assert "| aoe | 4.7000 | 4.6000 | diverged | **4.5500** at 0.001732 | 0.001732 |" in page


def _pilots(folder: StudyFolder, name: str, losses) -> None:
    for lr, loss in losses.items():
        cell = folder.pilot(name, 9, lr)
        if loss is None:
            write_cell(cell, records(9.0)[:1], exit_code=3)
        else:
            write_cell(cell, records(loss))
