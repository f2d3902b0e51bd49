"""The tool that trains a study: what it trains, skips and rejects, and how it ends."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_parallel.analysis.study.folder import Cell, StudyFolder
from tests.program import SMALL, flags, small_data
from tests.tools.study.fake_runs import ROOT, TOOL, FakeRuns, compare, finish


def test_trains_every_system_with_every_seed_and_reports(tool, tmp_path, capsys):
    runs = FakeRuns(finish)
    assert compare(tool, tmp_path, runs, "--selections", "topk,aoe", "--seeds", "2") == 0
    assert runs.ran == [("topk", 7), ("aoe", 7), ("topk", 8), ("aoe", 8)]
    assert [config.training.seed for config in runs.configs] == [7, 7, 8, 8]
    saves = [config.checkpoint.save for config in runs.configs]
    assert saves[2] == str(tmp_path / "study" / "cells" / "topk" / "seed-8")
    assert len({config.model for config in runs.configs}) == 1
    printed = capsys.readouterr().out
    assert printed.index("| topk | 1,000 |") < printed.index("[1/4] topk, seed 7: training")
    assert "total parameters differ by at most 0.90%" in printed
    assert "[4/4] aoe, seed 8: loss prose 4.0800; 100 tokens/s" in printed
    assert printed.rstrip().endswith(f"report: {tmp_path / 'study' / 'table.md'}")
    assert "| topk | 4.075 ± 0.007 (4.070 to 4.080) |" in (tmp_path / "study/table.md").read_text()


def test_goes_on_where_it_stopped_and_takes_more(tool, tmp_path, capsys):
    def stop_in_the_second(cell: Cell, stop: Any) -> int:
        if cell.contender == "topk":
            return finish(cell)
        stop._note(signal.SIGINT, None)
        return 75

    first = FakeRuns(stop_in_the_second)
    assert compare(tool, tmp_path, first, "--selections", "topk,aoe", "--seeds", "2") == 75
    assert first.ran == [("topk", 7), ("aoe", 7)]
    captured = capsys.readouterr()
    assert captured.out.rstrip().endswith("interrupted; the same command continues from here")
    assert "failed" not in captured.err
    assert not (tmp_path / "study" / "table.md").exists()

    again = FakeRuns(finish)
    assert compare(tool, tmp_path, again, "--selections", "topk,aoe", "--seeds", "2") == 0
    assert again.ran == [("aoe", 7), ("topk", 8), ("aoe", 8)]
    assert "1 of 4 runs are finished already" in capsys.readouterr().out

    more = FakeRuns(finish)
    assert compare(tool, tmp_path, more, "--selections", "dense", "--seeds", "1") == 0
    assert more.ran == [("dense", 7)]
    page = (tmp_path / "study" / "table.md").read_text()
    assert [f"| {name} | 4.0" in page for name in ("topk", "aoe", "dense")] == [True] * 3
    assert "Not finished" not in page and "over 1 to 2 seeds (" in page


def test_no_run_starts_after_the_minutes(tool, tmp_path, capsys, monkeypatch):
    """Runs take 50 s: the third starts after 100 s, and a fourth would after 150. After each run,
    what is left takes as long."""
    import run_cells

    clock = [0.0]
    monkeypatch.setattr(run_cells, "monotonic", lambda: clock[0])

    def in_50_seconds(cell: Cell, stop: Any) -> int:
        clock[0] += 50
        return finish(cell)

    line = ("--selections", "topk,aoe", "--seeds", "2", "--minutes", "2")
    runs = FakeRuns(in_50_seconds)
    assert compare(tool, tmp_path, runs, *line) == 75
    assert runs.ran == [("topk", 7), ("aoe", 7), ("topk", 8)]
    printed = capsys.readouterr().out
    assert (
        "[1/4] topk, seed 7: loss prose 4.0700; 100 tokens/s; 50 s; 3 left, about 150 s" in printed
    )
    assert printed.rstrip().endswith("--minutes 2 are over; the same command continues from here")
    again = FakeRuns(in_50_seconds)
    assert compare(tool, tmp_path, again, *line) == 0
    assert again.ran == [("aoe", 8)]


def finish_unless(cell: Cell, names: Collection[str]) -> int:
    return 0 if cell.contender in names else finish(cell)


def test_a_failed_run_is_told_and_the_others_go_on(tool, tmp_path, capsys):
    codes = {"topk": 3, "dense": 0}  # the latter without an evaluation
    runs = FakeRuns(lambda cell, stop: codes.get(cell.contender) or finish_unless(cell, codes))
    assert compare(tool, tmp_path, runs, "--selections", "topk,aoe,dense", "--seeds", "1") == 1
    assert runs.ran == [("topk", 7), ("aoe", 7), ("dense", 7)]
    errors = capsys.readouterr().err
    assert "[1/3] topk, seed 7: failed with exit code 3: what it printed; 2 left" in errors
    assert "dense, seed 7: ended without an evaluation: give --config a --split" in errors
    first = errors.splitlines()[-2]
    assert re.fullmatch(r"failed: topk, seed 7; see .*/cells/topk/seed-7/output.txt", first)
    assert "| aoe | 4.070 |" in (tmp_path / "study" / "table.md").read_text()


def test_unequal_totals_are_refused_unless_asked_for(tool, tmp_path, capsys):
    runs = FakeRuns(finish)
    line = ("--selections", "topk,wide=aoe,dense", "--seeds", "1")
    assert compare(tool, tmp_path, runs, *line) == 2
    assert runs.ran == [] and not (tmp_path / "study").exists()
    (message,) = capsys.readouterr().err.splitlines()
    assert message == (
        "compare_selection.py: wide has 1,011 parameters and topk 1,000, 1.1% apart: give them "
        "equal sizes, or --allow-unequal"
    )
    assert compare(tool, tmp_path, runs, *line, "--allow-unequal") == 0
    assert len(runs.ran) == 3


def test_active_parameters_where_training_decides_the_experts_per_token(tool, tmp_path, capsys):
    line = ("--selections", "top_p,topk", "--seeds", "1")
    assert compare(tool, tmp_path, FakeRuns(finish), *line) == 0
    assert "| top_p | 1,000 | – | – | – |\n" in capsys.readouterr().out
    page = (tmp_path / "study" / "table.md").read_text()
    assert "| top_p | 1,000 | 225 | 225 | – | 2.25 |" in page
    assert "| topk | 1,000 | 500 | 500 | – | 2.25 |" in page
    assert "Active parameters of top_p are those at the experts per token that were meas" in page


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (["--selections", "topk,topq"], {}, "--selections names topq: choose from topk, "),
        *((["--selections", "topk", f"--part={p}"], {}, p) for p in ("3/3", "1")),
        (["--selections", "topk", "--seed", "1"], {}, "--seed is not a flag of this program"),
        ([], {}, "--selections is not set: name systems, or give the section study"),
        (["--selections", "topk"], {"study": {"margin": -1}}, "study: margin is -1"),
        (["--selections", "topk", "--stage", "grid"], {}, "--stage grid needs lr-grid"),
        (["--selections", "topk"], {"lr": "x"}, "contender topk: --lr is 'x'"),
        (["--selections", "topk", "--nproc", "3"], {}, "contender topk: --global-batch-size"),
        (["--selections", "topk", "--output", "."], {}, "--output . contains files, but no study"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    tool, tmp_path, capsys, monkeypatch, arguments, changes, message
):
    runs = FakeRuns(finish)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert compare(tool, tmp_path, runs, *arguments, **changes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compare_selection.py: ") and message in line
    assert runs.ran == []


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(TOOL), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def small_study(folder: Path, **changes: Any) -> list[str]:
    """The command line of a study of the small model of tests/program.py."""
    data = {name: str(value) for name, value in small_data(folder).items() if name != "data_path"}
    data["data_path"] = f"{folder / 'cycle'} {folder / 'noise'}"
    options = SMALL | {"aoe_low_rank_size": 8, "vocab_size": 320} | data | changes
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({k.replace("_", "-"): v for k, v in options.items()}))
    named = {"config": path, "output": folder / "study", "threads": 1}
    return flags(named)


@pytest.mark.full
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path):
    line = [*small_study(tmp_path, train_iters=60, lr_warmup_iters=4), "--seeds", "1"]
    line += ["--selections", "topk,aoe"]
    process = start(tmp_path, *line)
    study = StudyFolder(tmp_path / "study")
    cell, other = study.cell("topk", 1234), study.cell("aoe", 1234)
    deadline = time.monotonic() + 200
    while not cell.records():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 75, (printed, errors)
    assert "stopping: the run saves after its step" in printed
    assert printed.rstrip().endswith("interrupted; the same command continues from here")
    assert not cell.is_finished(60)

    process = start(tmp_path, *line)
    printed, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert "going on after iteration" in cell.output.read_text()
    assert [attempt["exit_code"] for attempt in cell.attempts()] == [75, 0]
    (attempt,) = other.attempts()
    assert attempt["exit_code"] == 0 and attempt["software"]["torch"]
    logged = [record["iteration"] for record in cell.records() if "lm_loss" in record]
    assert logged == list(range(1, 61))
    totals = {name: counts["total"] for name, counts in study.manifest().parameters.items()}
    assert totals["topk"] != totals["aoe"] and f"| topk | {totals['topk']:,} |" in printed
    cells = list(csv.DictReader((study.path / "cells.csv").open()))
    assert [(cell["contender"], cell["seed"]) for cell in cells] == [
        ("topk", "1234"), ("aoe", "1234")
    ]  # fmt: skip
    assert {cell["consumed_tokens"] for cell in cells} == {str(60 * 8 * 32)}
    assert cells[0]["cycle/loss"] != cells[1]["cycle/loss"]
    page = (study.path / "table.md").read_text()
    assert "cycle, nats/token" in page and "noise, bits/byte" in page
    assert {path.name for path in (study.path / "figures").iterdir()} >= {"loss.png", "load.png"}
