"""The tables and figures of a study, from made-up runs."""

import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from moe_parallel.analysis.study.figures import draw_figures
from moe_parallel.analysis.study.folder import StudyFolder
from moe_parallel.analysis.study.report import markdown, study_notes, write_study_report
from moe_parallel.analysis.study.results import StudyResults
from moe_parallel.errors import InputError
from tests.analysis.study_folder import TOKENS, layer, make_study, plausible_records, write_cell

KINDS = {"topk": "fixed", "aoe": "norms", "top_p": "dynamic", "lory": "merged", "dense": "dense"}


def short_run(loss: float, speed: float, tokens: int = 40 * TOKENS, dropped: int = 0):
    """Two logged iterations and an evaluation; one layer with two experts."""
    layers = [layer(1, [30, 10], tokens_dropped=dropped, experts_per_token=2.0)]
    place = {"iteration": 40, "consumed_tokens": tokens}
    measured = {"lm_loss": loss, "tokens_per_second": speed, "layers": layers}
    measured["peak_memory_bytes"] = 512 * 2**20
    text = {"loss": loss, "bits_per_byte": loss / 2, "layers": layers}
    return [
        {**measured, "iteration": 20, "consumed_tokens": tokens // 2, "tokens_per_second": 1.0},
        {**measured, **place},
        {**place, "validation": {"prose": text}},
    ]


@pytest.fixture
def two_by_two(tmp_path: Path) -> StudyFolder:
    parameters = {"aoe": {"total": 1008, "active": 610, "active_compute": 720}}
    study = make_study(tmp_path / "first", ["topk", "aoe"], parameters=parameters)
    for name, seed, loss, speed in (
        ("topk", 1, 4.0, 1000.0),
        ("topk", 2, 4.4, 1200.0),
        ("aoe", 1, 3.9, 900.0),
        ("aoe", 2, 4.5, 900.0),
    ):
        write_cell(study.cell(name, seed), short_run(loss, speed, dropped=4 if seed == 1 else 0))
    return study


def rows(page: str, title: str) -> dict[str, list[str]]:
    """The table under a title: {first cell: the other cells}; the header row has the key ""."""
    lines = page.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return {first: others for first, *others in cells if first != "---"}


def test_the_page_of_two_systems_and_two_seeds(two_by_two: StudyFolder):
    page = markdown(StudyResults.read(two_by_two))
    # The sample deviation of two values is |a - b| / sqrt(2), so .4 -> .283 and .6 -> .424.
    assert rows(page, "Held-out text") == {
        "": ["prose, nats/token", "prose, bits/byte"],
        "topk": ["4.200 ± 0.283 (4.000 to 4.400)", "2.100 ± 0.141 (2.000 to 2.200)"],
        "aoe": ["4.200 ± 0.424 (3.900 to 4.500)", "2.100 ± 0.212 (1.950 to 2.250)"],
    }
    # Per seed: 3.9 - 4.0 and 4.5 - 4.4.
    assert rows(page, "Loss minus that of topk with the same seed") == {
        "": ["prose, nats/token"],
        "aoe": ["+0.000 ± 0.141 (−0.100 to +0.100)"],
    }
    # With one seed 8 of 80 choices were dropped, with the other none: 5% on average.
    costs = rows(page, "Size and speed")
    assert costs["topk"] == [
        "1,000", "600", "700", "–", "2.00 ± 0.00", "5.00% ± 7.07%", "1,100 ± 141", "512 ± 0"
    ]  # fmt: skip
    assert costs["aoe"][:3] == ["1,008", "610", "720"]
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert rows(page, "Routing")["aoe"][:4] == [
        f"{entropy:.3f} ± 0.000", "1.000 ± 0.000", "0.500 ± 0.000", "–"
    ]  # fmt: skip
    assert "The entropies are at most ln 4 = 1.386." in page


def test_files_for_computing(two_by_two: StudyFolder):
    write_study_report(two_by_two)
    cells = list(csv.DictReader(io.StringIO((two_by_two.path / "cells.csv").read_text())))
    assert [(c["contender"], c["seed"], float(c["prose/loss"])) for c in cells] == [
        ("topk", "1", 4.0), ("topk", "2", 4.4), ("aoe", "1", 3.9), ("aoe", "2", 4.5)
    ]  # fmt: skip


def test_notes_of_an_ordinary_study(two_by_two: StudyFolder):
    said = "\n".join(study_notes(StudyResults.read(two_by_two)))
    assert "0.00M parameters, 5,120 tokens (5.1 a parameter), 2 seeds. " in said
    assert "Total parameters differ by at most 0.80%. " in said
    assert "options of the study's file, including the learning rate: none was tuned" in said
    assert "Python 3.11.1, torch 2.0; 1 process a run, 2 threads each, one run at a time." in said
    for absent in ("NOT an equal", "Not finished", "More than one machine", "starts with outputs"):
        assert absent not in said


def test_notes_of_a_study_with_flaws(tmp_path: Path):
    study = make_study(
        tmp_path / "study",
        ["topk", "smear", "dense"],
        shared={"topk:weight_decay": 0.0, "dense:lr": "1e-3", "moe_expert_capacity_factor": 1.0},
        parameters={"smear": {"total": 1100, "active": 1100, "active_compute": 1100}},
    )
    write_cell(study.cell("topk", 1), short_run(4.0, 1.0))
    write_cell(study.cell("smear", 1), short_run(4.0, 1.0, tokens=4000), machine="another")
    write_cell(study.cell("dense", 2), short_run(4.0, 1.0))
    said = "\n".join(study_notes(StudyResults.read(study)))
    for sentence in (
        "Total parameters differ by at most 10.00%: NOT an equal comparison. dense has no experts",
        "different for topk: `--weight-decay 0.0`; dense: `--lr 1e-3`.",
        "topk, smear: which choices an over-full expert drops",
        "smear: every token sees the mean of its whole sequence",
        "Not finished, and not in the tables: dense (seed 1), topk (seed 2), smear (seed 2).",
        "Runs read between 4,000 and 5,120 tokens: NOT an equal comparison.",
        "More than one machine or version, so speeds cannot be compared: a processor, 2 cores, 8 "
        "GiB; Python 3.11.1, torch 2.0 (2 starts); another; ",
    ):
        assert sentence in said
    page = rows(markdown(StudyResults.read(study)), "Held-out text")
    assert list(page) == ["", "topk †", "smear †", "dense"]


def test_a_study_without_a_finished_run(tmp_path: Path):
    with pytest.raises(InputError, match="does not contain a study"):
        write_study_report(StudyFolder(tmp_path))
    with pytest.raises(InputError, match="has no finished run yet"):
        write_study_report(make_study(tmp_path / "study", ["topk"]))


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory) -> StudyResults:
    """One variant has its own name, so that there are fewer colors than contenders."""
    words = [*KINDS, "variant=aoe", "second=topk"]
    shape = {"train_iters": 200, "num_layers": 3, "num_experts": 8}
    study = make_study(tmp_path_factory.mktemp("kinds") / "all kinds", words, shared=shape)
    for cell in study.cells(study.manifest().seeds):
        kind = KINDS.get(cell.contender, "norms" if cell.contender == "variant" else "fixed")
        write_cell(cell, plausible_records(kind, cell.seed))
    return StudyResults.read(study)


def titles(figure: Figure) -> list[str]:
    return [title for axes in figure.axes if (title := axes.get_title(loc="left"))]


def test_loss_curves_are_means_with_a_band_and_differences_from_the_first(all_kinds):
    figure = draw_figures(all_kinds)["loss"]
    assert titles(figure) == [
        "training", "held out, code", "held out, prose", *["minus topk, same seed"] * 3
    ]  # fmt: skip
    code, minus = figure.axes[1], figure.axes[4]
    lines = {line.get_label(): line for line in code.lines}
    assert list(lines) == [*KINDS, "variant", "second"]
    runs = {r.name: [x.history.loss("code").values_R for x in r.runs.values()] for r in
            all_kinds.results}  # fmt: skip
    np.testing.assert_allclose(lines["lory"].get_ydata(), np.mean(runs["lory"], axis=0))
    dense = next(line for line in minus.lines if line.get_label() == "dense")
    expected = np.mean(np.subtract(runs["dense"], runs["topk"]), axis=0)
    np.testing.assert_allclose(dense.get_ydata(), expected, atol=1e-12)
    styles = {(line.get_color(), line.get_linestyle()) for line in code.lines}
    assert len(styles) == len(lines)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(lines)


def test_one_evaluation_is_no_curve(two_by_two):
    figure = draw_figures(StudyResults.read(two_by_two))["loss"]
    assert titles(figure) == ["training", "minus topk, same seed"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["tokens read"] * 2
    minus = figure.axes[1].lines[1]
    np.testing.assert_allclose(minus.get_ydata(), [0, 0], atol=1e-12)  # -0.1 and +0.1


def test_the_tests_in_a_figure(tmp_path: Path):
    """D = 0.1, 0.2, 0.3 for aoe: mean 0.2, and its interval is t_.975(2) / 10 sqrt(3) wide."""
    words, seeds = ["topk", "aoe", "dense"], [1, 2, 3]
    study = make_study(tmp_path / "study", words, seeds=seeds, design={"margin": 0.5})
    for seed in seeds:
        write_cell(study.cell("topk", seed), short_run(4.0, 1.0))
        write_cell(study.cell("aoe", seed), short_run(4.0 + seed / 10, 1.0))
    write_cell(study.cell("dense", 1), short_run(5.0, 1.0))  # one seed: reported, not compared
    (axes,) = draw_figures(StudyResults.read(study))["tests"].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["aoe"]
    _, dots, interval, mean = axes.lines
    np.testing.assert_allclose(dots.get_xdata(), [0.1, 0.2, 0.3])
    np.testing.assert_allclose(interval.get_xdata(), [0.2 - 0.24841, 0.2 + 0.24841], atol=1e-5)
    np.testing.assert_allclose(mean.get_xdata(), [0.2])
    (margin,) = axes.patches
    assert (margin.get_x(), margin.get_width()) == (-0.5, 1.0)
    (verdicts,) = axes.child_axes
    assert [label.get_text() for label in verdicts.get_yticklabels()] == ["equivalent"]


def test_loads_norms_experts_per_token_and_weights(all_kinds):
    figures = draw_figures(all_kinds)
    names = [title.splitlines()[0] for title in titles(figures["load"])]
    assert names == [name for name in [*KINDS, "variant", "second"] if name != "dense"]
    (image,) = figures["load"].axes[0].images
    np.testing.assert_allclose(np.asarray(image.get_array()).mean(axis=1), 1)
    assert titles(figures["load"])[0].splitlines()[1].startswith("Ent_load 2.0")

    assert titles(figures["norms"]) == ["aoe", "variant"]
    colors = [str(line.get_color()) for line in figures["norms"].axes[0].lines]
    assert (len(colors), len(set(colors))) == (3 * 8, 3)  # a color for each layer

    code, prose = figures["experts_per_token"].axes
    labels = [line.get_label().splitlines()[0] for line in code.lines]
    assert labels == ["top_p", "2 in every layer:", "1 in every layer:"]
    np.testing.assert_allclose(code.lines[0].get_ydata(), [2.2, 2.7, 3.2])
    np.testing.assert_allclose(prose.lines[0].get_ydata(), [1.8, 2.3, 2.8])

    drawn = figures["domain_weights"]
    assert titles(drawn) == [f"lory, layer {number}" for number in (1, 2, 3)]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["code", "prose"]
    weights = all_kinds.results[3].first.held_out("routing_weight_per_expert")
    heights = [bar.get_height() for bar in drawn.axes[1].patches]
    np.testing.assert_allclose(heights, [*weights["code"][1], *weights["prose"][1]])


def test_pictures_that_show_nothing_are_not_drawn(tmp_path: Path):
    study = make_study(tmp_path / "study", ["dense"], seeds=[1], shared={"train_iters": 200})
    write_cell(study.cell("dense", 1), plausible_records("dense", 1))
    (study.path / "figures").mkdir()
    (study.path / "figures" / "norms.png").write_text("of an earlier report")
    page = write_study_report(study).read_text()
    assert [p.name for p in (study.path / "figures").iterdir()] == ["loss.png"]
    assert page.endswith("\n![loss](figures/loss.png)\n")
    assert "–" in rows(page, "Routing")["dense"]
    # One run has no spread, is compared with nothing, and recorded no start.
    assert len(rows(page, "Held-out text")["dense"][0]) == len("4.000")
    assert "minus that of" not in page
    assert "over 1 seed (" in page


def started(rms: tuple[float, float], loss: float = 4.0):
    """A run of two layers, whose outputs had this RMS in the first iteration."""
    records = short_run(loss, 1000.0)
    first = [layer(number, [30, 10], output_rms=size) for number, size in enumerate(rms, start=1)]
    return [{**records[0], "layers": first}, *records[1:]]


def test_outputs_at_the_start(tmp_path: Path):
    """Means of 0.02 and 0.05 over layers, and of 0.004 over layers and seeds: 2.5 and 0.2 times."""
    study = make_study(tmp_path / "study", ["topk", "aoe", "small=aoe", "dense"])
    starts = {"topk": (0.01, 0.03), "aoe": (0.05, 0.05), "small": (0.002, 0.006), "dense": ()}
    for cell in study.cells(dict.fromkeys(starts, [1, 2])):
        write_cell(cell, started(starts[cell.contender]))
    results = StudyResults.read(study)
    last = {name: cells[-1] for name, cells in rows(markdown(results), "Routing").items()}
    assert last == {
        "": "RMS of outputs at the start", "topk": "0.02 ± 0", "aoe": "0.05 ± 0",
        "small": "0.004 ± 0", "dense": "–",
    }  # fmt: skip
    (told,) = [note for note in study_notes(results) if "starts with outputs" in note]
    assert told.startswith("**small** starts with outputs of its MoE layers 0.2 times as")
