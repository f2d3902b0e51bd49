"""Pilot runs: their order, what they decide, and how a study with them ends and continues."""

import json
import signal
import threading
from typing import Any

import pytest

from moe_parallel.analysis.study.contenders import SharedFile, choose_contenders
from moe_parallel.analysis.study.design import StudyDesign
from moe_parallel.analysis.study.folder import Cell, StudyFolder, grid_of
from moe_parallel.config import read_yaml
from tests.tools.study.fake_runs import ROOT, FakeRuns, compare, evaluation, finish, write

SECTION = {"selections": ["topk", "aoe"], "seeds": 2, "lr-grid": ["1/3", 1, 3], "pilot-seed": 99}
OPTIONS: dict[str, Any] = {"lr": 3e-3, "min_lr": 3e-4, "study": SECTION}
#: topk's best rate is in the middle of the grid, and lower rather than higher; aoe's is beyond it.
BEST = {"topk": 0.0025, "aoe": 0.05}
PILOTS = [
    "topk 99 0.001", "aoe 99 0.001", "topk 99 0.003", "aoe 99 0.003", "topk 99 0.009",
    "aoe 99 0.009", "topk 99 0.001732", "aoe 99 0.027",
]  # fmt: skip
COMPARED = ["topk 7 0.003", "aoe 7 0.027", "topk 8 0.003", "aoe 8 0.027"]


def by_rate(cell: Cell, stop: Any = None) -> int:
    """The loss grows with the distance from the best rate."""
    if cell.lr is None:
        return finish(cell)
    distance = abs(cell.lr / BEST[cell.contender] - 1)
    return write(cell, evaluation(4.0 + distance))


def test_pilot_runs_decide_the_rate_of_the_compared_runs(tool, tmp_path, capsys):
    runs = FakeRuns(by_rate)
    assert compare(tool, tmp_path, runs, **OPTIONS) == 0
    assert runs.names == PILOTS + COMPARED
    shares = {round(c.optimizer.min_lr / c.optimizer.lr, 3) for c in runs.configs}
    assert shares == {0.1}
    printed = capsys.readouterr().out
    assert "[ 1/12] topk, pilot run at lr 0.001: training" in printed
    assert "[12/12] aoe, seed 8: loss prose 4.0800" in printed
    page = (tmp_path / "study" / "table.md").read_text()
    assert "| 0.027 ‡ |" in page
    assert "different for topk: `--lr 0.003` `--min-lr 0.0003`; aoe: `--lr 0.027`" in page

    again = FakeRuns(by_rate)
    assert compare(tool, tmp_path, again, **OPTIONS) == 0
    assert again.ran == [] and "12 of 12 runs are finished already" in capsys.readouterr().out


def test_a_study_that_is_killed_goes_on(tool, tmp_path):
    """It is stopped in a pilot run, and then killed without a word in a compared one."""

    def stop_in_the_third(cell: Cell, stop: Any) -> int:
        if cell.lr != 0.003:
            return by_rate(cell)
        stop._note(signal.SIGINT, None)
        return 75

    first = FakeRuns(stop_in_the_third)
    assert compare(tool, tmp_path, first, **OPTIONS) == 75
    assert first.names == PILOTS[:3]

    def die_in_the_second_seed(cell: Cell, stop: Any) -> int:
        if cell.seed == 8:
            raise MemoryError
        return by_rate(cell)

    second = FakeRuns(die_in_the_second_seed)
    with pytest.raises(MemoryError):
        compare(tool, tmp_path, second, **OPTIONS)
    assert second.names == PILOTS[2:] + COMPARED[:3]

    third = FakeRuns(by_rate)
    assert compare(tool, tmp_path, third, **OPTIONS) == 0
    assert third.names == COMPARED[2:]


def test_a_pilot_run_that_diverges_is_a_result(tool, tmp_path, capsys):
    def diverge_above(cell: Cell, stop: Any) -> int:
        return 3 if cell.lr is not None and cell.lr > 0.004 else by_rate(cell)

    runs = FakeRuns(diverge_above)
    assert compare(tool, tmp_path, runs, **OPTIONS) == 0
    assert "aoe 7 0.003" in runs.names
    assert "aoe, pilot run at lr 0.009: diverged; " in capsys.readouterr().out
    assert "| diverged |" in (tmp_path / "study" / "table.md").read_text()
    again = FakeRuns(diverge_above)
    assert compare(tool, tmp_path, again, **OPTIONS) == 0
    assert again.ran == []


def test_a_pilot_run_that_fails_keeps_its_contender_out_until_it_is_repeated(
    tool, tmp_path, capsys
):
    def fail_once(cell: Cell, stop: Any) -> int:
        return 1 if (cell.contender, cell.lr) == ("aoe", 0.003) else by_rate(cell)

    runs = FakeRuns(fail_once)
    assert compare(tool, tmp_path, runs, **OPTIONS) == 1
    assert [name for name in runs.names if name.startswith("topk")] == [
        *PILOTS[:8:2], "topk 7 0.003", "topk 8 0.003"
    ]  # fmt: skip
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1] == "not compared: aoe, whose pilot runs are not finished, or all diverged"
    assert errors[-2].startswith("failed: aoe, pilot run at lr 0.003; see ")
    again = FakeRuns(by_rate)
    assert compare(tool, tmp_path, again, **OPTIONS) == 0
    assert again.names == ["aoe 99 0.003", "aoe 99 0.027", "aoe 7 0.027", "aoe 8 0.027"]


def test_balancing_is_tuned_at_the_chosen_rate(tool, tmp_path, capsys):
    """topk's other strength is better; of aoe's, one is worse and one diverges."""
    losses = {("topk", 0.1): 3.0, ("aoe", 0.001): 9.0, ("aoe", 0.1): None}

    def by_strength(cell: Cell, stop: Any = None) -> int:
        if cell.balance is None:
            return by_rate(cell)
        loss = losses[cell.contender, cell.balance[1]]
        return 3 if loss is None else write(cell, evaluation(loss))

    grid = {"topk:moe-aux-loss-coeff": [0.1], "aoe:moe-aux-loss-coeff": [0.001, 0.1]}
    options = {**OPTIONS, "study": {**SECTION, "balance-grid": grid}}
    runs, trained = FakeRuns(by_strength), []
    assert compare(tool, tmp_path, runs, **options) == 0
    assert runs.names == [*PILOTS, "topk 99 0.003", "aoe 99 0.027", "aoe 99 0.027", *COMPARED]
    strengths = [c.selection.moe_aux_loss_coeff for c in runs.configs]
    assert strengths == [0.01] * 8 + [0.1, 0.001, 0.1] + [0.1, 0.01] * 2
    page = (tmp_path / "study" / "table.md").read_text()
    assert "| topk | `--moe-aux-loss-coeff` | 4.2000 | 3.0000 at 0.1 | 0.1 |" in page
    assert "| 9.0000 at 0.001; diverged at 0.1 | its own |" in page
    assert "pilot run at lr 0.027, --moe-aux-loss-coeff 0.1: diverged" in capsys.readouterr().out
    for name in ("parts", "wrong"):
        (tmp_path / name).mkdir()
    for stage, parts in (("grid", 4), ("further", 2), ("balance", 2), ("seeds", 3)):
        for part in range(parts):
            runs, line = FakeRuns(by_strength), ("--stage", stage, "--part", f"{part}/{parts}")
            assert compare(tool, tmp_path / "parts", runs, *line, **options) == 0
            trained += runs.names
    assert len(trained) == 15
    wrong = {**options, "study": {**SECTION, "balance-grid": {"aoe:moe-threshold-ema": [0.5]}}}
    assert compare(tool, tmp_path / "wrong", FakeRuns(by_strength), **wrong) == 2
    assert "contender aoe: " in capsys.readouterr().err


def test_stages_and_parts_train_each_run_once(tool, tmp_path, capsys):
    trained: list[str] = []
    for stage, parts in (("grid", 4), ("further", 2), ("seeds", 3)):
        for part in range(parts):
            runs = FakeRuns(by_rate)
            line = ("--stage", stage, "--part", f"{part}/{parts}")
            assert compare(tool, tmp_path, runs, *line, **OPTIONS) == 0
            trained += runs.names
    assert sorted(trained) == sorted(PILOTS + COMPARED)
    assert not (tmp_path / "study" / "table.md").exists()
    capsys.readouterr()
    assert compare(tool, tmp_path, FakeRuns(by_rate), "--part", "0/2", **OPTIONS) == 2
    assert "--part of a study with lr-grid needs --stage" in capsys.readouterr().err


def test_a_signal_stops_all_jobs(tool, tmp_path, capsys):
    """Each run waits for another one: with one job at a time the barrier would break."""
    both = threading.Barrier(2, timeout=20)

    def stop_one(cell: Cell, stop: Any) -> int:
        both.wait()
        if cell.contender == "topk":
            stop._note(signal.SIGTERM, None)
        both.wait()
        return 75

    runs = FakeRuns(stop_one)
    assert compare(tool, tmp_path, runs, "--jobs", "2", **OPTIONS) == 75
    assert len(runs.ran) == 2
    assert "failed" not in capsys.readouterr().err


def test_equal_flops_are_fitted_before_training(tool, tmp_path, monkeypatch, capsys):
    def count(contender: Any, experts_per_token: float | None = None) -> dict[str, int]:
        flops = {"topk": 100, "aoe": 125}[contender.name]
        return {"total": 1000, "active": 1, "active_compute": 1, "flops_per_token": flops}

    monkeypatch.setattr(tool, "count_parameters", count)
    runs = FakeRuns(by_rate)
    assert compare(tool, tmp_path, runs, "--equal", "flops", **OPTIONS) == 0
    assert {c.training.train_iters for c in runs.configs[::2]} == {40}
    assert {c.training.train_iters for c in runs.configs[1::2]} == {32}
    manifest = json.loads((tmp_path / "study" / "study.json").read_text())
    assert manifest["fitted"] == {"aoe": {"train_iters": 32, "lr_warmup_iters": 8}}
    assert compare(tool, tmp_path, FakeRuns(by_rate), **OPTIONS) == 2
    assert "a study of equal 'flops', and now it is 'experts'" in capsys.readouterr().err


def test_what_is_stated_before_cannot_be_changed_after(tool, tmp_path, capsys):
    stated = {**OPTIONS, "study": {**SECTION, "margin": 0.01}}
    assert compare(tool, tmp_path, FakeRuns(by_rate), **stated) == 0
    assert "What the numbers show" in (tmp_path / "study" / "table.md").read_text()
    wider = {**OPTIONS, "study": {**SECTION, "margin": 0.5}}
    assert compare(tool, tmp_path, FakeRuns(by_rate), **wider) == 2
    assert "a study of margin 0.01, and now it is 0.5" in capsys.readouterr().err
    assert StudyFolder(tmp_path / "study").manifest().design.margin == 0.01


def test_a_whole_study_beside_a_part_of_it_is_refused(tool, tmp_path, capsys):
    def second(cell: Cell, stop: Any) -> int:
        for line in ([], ["--stage", "grid", "--part", "0/2"]):
            assert compare(tool, tmp_path, FakeRuns(finish), *line, **OPTIONS) == 2
            assert "study is in use by another command: wait" in capsys.readouterr().err
        return 1

    line = ["--stage", "grid", "--part", "0/2"]
    seen = FakeRuns(lambda cell, stop: second(cell, stop) if cell.lr == 0.001 else by_rate(cell))
    assert compare(tool, tmp_path, seen, *line, **OPTIONS) == 1


def test_the_study_on_language_is_valid_and_sees_sixty_bytes_an_active_parameter(tool):
    raw = read_yaml(ROOT / "examples" / "studies" / "selections_language.yaml")
    design = StudyDesign.from_raw(raw.pop("study"))
    chosen = choose_contenders(design.selections, SharedFile.from_raw(raw))
    for contender in chosen:
        option, values = design.balance_grid.get(contender.name, ("", ()))
        for tried in ({}, *({option: value} for value in values)):
            tool.check_trainable(contender.with_options(tried), 1)
        grid_of(contender, design.lr_grid)
    config = chosen[0].config
    d, width, k = config.model.hidden_size, config.expert_width, 2
    # Of topk: the embedding; per layer two norms, attention, router and the chosen experts.
    layer = 2 * d + d * (d + 2 * d // 2) + d * d + config.num_experts * d + k * 3 * d * width
    active = config.data.vocab_size * d + config.model.num_layers * layer + d
    assert 60 * active < config.training.train_iters * 16 * 256
