"""The folder of a study: finished runs, the refusal of another study, and learning rates."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from moe_parallel.analysis.study.contenders import SharedFile, choose_contenders
from moe_parallel.analysis.study.folder import (
    DIVERGED,
    StudyFolder,
    StudyManifest,
    Sweep,
    grid_of,
    lr_options,
)
from moe_parallel.errors import InputError
from moe_parallel.training.signals import EXIT_DIVERGED
from tests.analysis.study_folder import SHARED, make_study


def asked(words, seeds=(1, 2), **shared) -> tuple[StudyManifest, SharedFile]:
    file = SharedFile.from_raw({**SHARED, **shared})
    chosen = choose_contenders(words, file)
    of_each = {c.name: list(seeds) for c in chosen}
    return StudyManifest({c.name: c for c in chosen}, of_each, 1, 2, {}), file


def test_a_run_has_its_seed_and_folder_and_what_the_study_has_set(tmp_path: Path):
    study = make_study(tmp_path / "study", ["topk"], shared={"lr": 1e-3, "min_lr": 1e-4})
    options = {"fitted": {"topk": {"train_iters": 30}}, "tuned": {"topk": {"lr": 2e-3}}}
    manifest = replace(study.manifest(), **options)
    compared, pilot = study.cell("topk", 7), study.pilot("topk", 9, 0.01)
    config = manifest.config_of(compared)
    assert (config.training.seed, config.checkpoint.save) == (7, str(compared.folder))
    assert (config.training.train_iters, config.optimizer.lr) == (30, 2e-3)
    config = manifest.config_of(pilot)
    assert (config.training.seed, config.checkpoint.save) == (9, str(pilot.folder))
    assert (config.training.train_iters, config.optimizer.lr) == (30, 0.01)
    assert (config.optimizer.min_lr, pilot.folder.name) == (1e-3, "lr-0.01")
    assert StudyManifest.from_json(manifest.to_json().encode()) == manifest


def test_cells_go_seed_by_seed(tmp_path: Path):
    cells = StudyFolder(tmp_path).cells({"a": [1, 2, 3], "b": [1, 2]})
    order = [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3)]
    assert [(c.contender, c.seed) for c in cells] == order


@pytest.mark.parametrize(
    ("lines", "finished"),
    [
        (None, False),
        ([{"iteration": 40, "lm_loss": 1.0}], False),
        ([{"iteration": 20, "validation": {}}], False),
        ([{"iteration": 40, "validation": {}}, '{"iteration": 4'], True),
    ],
    ids=["not begun", "not evaluated", "half way", "evaluated"],
)
def test_a_run_is_finished_by_its_last_evaluation(tmp_path: Path, lines, finished):
    cell = StudyFolder(tmp_path).cell("topk", 1)
    cell.folder.mkdir(parents=True)
    if lines is not None:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (cell.folder / "metrics.jsonl").write_text(text)
    assert cell.is_finished(40) is finished


def test_systems_and_seeds_may_be_added(tmp_path: Path):
    earlier = make_study(tmp_path / "study", ["topk", "aoe"], shared={"lr": "1e-3"}).manifest()
    now, file = asked(["dense", "topk"], seeds=(1, 2, 3), lr=0.001)
    joined = now.joined_to(earlier, file)
    assert list(joined.contenders) == ["topk", "aoe", "dense"]
    assert joined.seeds == {"topk": [1, 2, 3], "aoe": [1, 2], "dense": [1, 2, 3]}
    assert joined.parameters == earlier.parameters


@pytest.mark.parametrize(
    ("words", "shared", "message"),
    [
        (["topk"], {"topk:lr": 0.5}, "a study of topk with --lr 0.0003, and now it is 0.5"),
        (["topk=aoe"], {}, "a study of topk = 'topk', and now it is 'aoe'"),
        # A cell of a contender that this command does not train.
        (["dense"], {"moe_aux_loss_coeff": 0.5}, "topk with --moe-aux-loss-coeff 0.01"),
    ],
)
def test_another_study_in_the_folder_is_refused(tmp_path, words, shared, message):
    earlier = make_study(tmp_path / "study", ["topk"]).manifest()
    now, file = asked(words, **shared)
    with pytest.raises(InputError, match=message):
        now.joined_to(earlier, file)
    with pytest.raises(InputError, match="a study of processes 1, and now it is 2"):
        replace(now, processes=2).joined_to(earlier, file)


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    assert StudyFolder(tmp_path / "new").manifest() is None
    (tmp_path / ".lock").touch()
    assert StudyFolder(tmp_path).manifest() is None
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match="contains files, but no study.json: name a new folder"):
        StudyFolder(tmp_path).manifest()
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(InputError, match="study.json cannot be read"):
        StudyFolder(tmp_path).manifest()


GRID = (0.001, 0.003, 0.009)
LOWER = 0.0003333  # .001^2 / .003


@pytest.mark.parametrize(
    ("losses", "further", "its_loss", "best", "is_edge"),
    [
        ((4.0, 4.1, 4.2), LOWER, None, None, False),  # the further run is missing
        ((4.0, 4.1, 4.2), LOWER, 3.9, LOWER, True),
        ((4.0, 4.1, 4.2), LOWER, 4.05, 0.001, False),
        ((4.2, 4.1, 4.0), 0.027, 4.1, 0.009, False),  # .009^2 / .003
        ((4.1, 4.0, 4.2), 0.001732, 3.9, 0.001732, False),  # between .003 and .001
        ((4.2, 4.0, 4.1), 0.005196, 4.3, 0.003, False),  # between .003 and .009
        ((4.0, 4.1, math.inf), LOWER, 4.3, 0.001, False),
        ((math.inf,) * 3, LOWER, math.inf, None, False),  # all diverged
        ((4.1, 4.0), None, None, None, False),
    ],
)
def test_the_further_run_extends_an_edge_or_refines_the_middle(
    losses, further, its_loss, best, is_edge
):
    found = dict(zip(GRID, losses, strict=False)) | (
        {} if its_loss is None else {further: its_loss}
    )
    sweep = Sweep(GRID, found)
    assert (sweep.further, sweep.best) == (further, best)
    assert best is None or sweep.best_is_at_an_edge == is_edge


def test_the_grid_is_around_the_contenders_own_rate_and_scales_the_whole_schedule():
    file = SharedFile.from_raw({**SHARED, "lr": 3e-3, "min_lr": 1e-4, "aoe:lr": 1e-3})
    topk, aoe = choose_contenders(["topk", "aoe"], file)
    factors = (1 / 3, 1.0, 3.0)
    assert grid_of(topk, factors) == (0.001, 0.003, 0.009)
    assert grid_of(aoe, factors) == (0.0003333, 0.001, 0.003)
    assert lr_options(topk, 0.009) == {"lr": 0.009, "min_lr": 0.0003}
    (still,) = choose_contenders(["topk"], SharedFile.from_raw({**SHARED, "lr": 0}))
    with pytest.raises(InputError, match="topk: --lr is 0"):
        grid_of(still, factors)


def test_divergence_has_the_exit_code_of_the_program():
    assert DIVERGED == EXIT_DIVERGED
