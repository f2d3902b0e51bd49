"""What the report recognizes, and what it says of the rest."""

import json
from pathlib import Path

import pytest

from moe_parallel.analysis.report.sources import find_sources, short_names
from moe_parallel.errors import InputError
from tests.analysis.report.folders import plan_file, run_folder, scaling_folder
from tests.analysis.study_folder import make_study, plausible_records, write_cell


def test_each_kind(tmp_path):
    run = run_folder(tmp_path / "a" / "run")
    sources = find_sources([run, scaling_folder(tmp_path / "s"), plan_file(tmp_path / "p.json")])
    assert sources.runs == [("run", run)]
    (study,) = sources.scaling
    assert study["name"] == "s" and study["rows"][1]["nodes"] == 2
    assert study["rows"][0]["plan_error"] is None and study["rows"][0]["ep"] == "all"
    (plan,) = sources.plans
    assert plan["name"] == "p" and plan["plan"]["gpus"] == 16 and plan["plan"]["refused"] == 2
    assert "messages" not in plan["plan"]["plans"][0]


def test_a_study_is_its_runs(tmp_path):
    study = make_study(tmp_path / "first", ["topk", "aoe"])
    with pytest.raises(InputError, match="no run of the study has metrics yet"):
        find_sources([study.path])
    for name, seed in (("topk", 1), ("aoe", 2)):
        write_cell(study.cell(name, seed), plausible_records("fixed", seed, logged=4))
    assert [name for name, _ in find_sources([study.path]).runs] == ["topk/seed-1", "aoe/seed-2"]
    other = run_folder(tmp_path / "aoe" / "seed-2")
    names = [name for name, _ in find_sources([study.path, other]).runs]
    assert names == ["topk/seed-1", "cells/aoe/seed-2", f"{tmp_path.name}/aoe/seed-2"]


def test_a_run_that_is_named_twice_is_one(tmp_path):
    run = run_folder(tmp_path / "run")
    assert find_sources([run, run]).runs == [("run", run)]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/a/run"], ["run"]),
        (["/a/x/run", "/a/y/run", "/a/z"], ["x/run", "y/run", "z"]),
        (["/s/aoe/seed-1", "/s/topk/seed-1"], ["aoe/seed-1", "topk/seed-1"]),
        (["/"], [""]),
    ],
)
def test_names_are_short_and_differ(paths, names):
    assert short_names([Path(path) for path in paths], [1] * len(paths)) == names


def test_wrong_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    torn = scaling_folder(tmp_path / "torn")
    (torn / "scaling.csv").write_text("a,b\n1,2\n")
    texts = {"text.json": "no JSON", "list.json": "[]", "other.json": json.dumps({"plans": []})}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for path, message in [
        (tmp_path / "gone", "there is no such folder or file"),
        (tmp_path / "empty", "has no metrics.jsonl, study.json or scaling.csv"),
        (torn, "is not a table of tools/study/scaling.py report"),
        *((tmp_path / name, "is not a plan: give a file") for name in texts),
    ]:
        with pytest.raises(InputError, match=message) as error:
            find_sources([path])
        assert "\n" not in str(error.value)
