"""What the report recognizes; its page keeps strangers' strings as text and needs no network."""

import base64
import hashlib
import json
import re

import pytest

from moe_parallel.analysis.report.report import find_sources, json_in_html, page_of
from moe_parallel.errors import InputError
from tests.analysis.report.folders import run_folder, scaling_folder
from tests.analysis.study_folder import make_study, plausible_records, write_cell


def test_each_kind(tmp_path):
    run = run_folder(tmp_path / "a" / "run")
    runs, (study,) = find_sources([run, scaling_folder(tmp_path / "s"), run])
    assert runs == [("run", run)]
    assert study["name"] == "s" and study["rows"][1]["nodes"] == 2
    assert study["rows"][0]["plan_error"] is None and study["rows"][0]["ep"] == "all"


def test_a_study_is_its_runs(tmp_path):
    study = make_study(tmp_path / "first", ["topk", "aoe"])
    with pytest.raises(InputError, match="no run of the study has metrics yet"):
        find_sources([study.path])
    for name, seed in (("topk", 1), ("aoe", 2)):
        write_cell(study.cell(name, seed), plausible_records("fixed", seed, logged=4))
    assert [name for name, _ in find_sources([study.path])[0]] == ["topk/seed-1", "aoe/seed-2"]
    other = run_folder(tmp_path / "aoe" / "seed-2")
    names = [name for name, _ in find_sources([study.path, other])[0]]
    assert names == ["topk/seed-1", "cells/aoe/seed-2", f"{tmp_path.name}/aoe/seed-2"]


def test_wrong_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    torn = scaling_folder(tmp_path / "torn")
    (torn / "scaling.csv").write_text("a,b\n1,2\n")
    for path, message in [
        (tmp_path / "gone", "there is no such folder"),
        (tmp_path / "empty", "has no metrics.jsonl, study.json or scaling.csv"),
        (torn, "is not a table of tools/study/scaling.py report"),
        (torn / "scaling.csv", "has no metrics.jsonl"),
    ]:
        with pytest.raises(InputError, match=message) as error:
            find_sources([path])
        assert "\n" not in str(error.value)


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>&lt;img src=x onerror=alert(1)>",
    "quotes \" and ' and \\",
    "\u2028\u2029\0",
    "half a pair: \ud800",
    "@@DATA@@",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_json_ends_no_element_and_is_the_same_text(text):
    found = json_in_html({text: [text]})
    assert not set("<>&") & set(found)
    assert json.loads(found) == {text: [text]}
    found.encode("utf-8")


def test_the_policy_allows_this_program_alone():
    page = page_of({"runs": [], "scaling": [], "command": ""}, "</title>@@STYLE@@\udc80")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert "<title>&lt;/title&gt;@@STYLE@@?</title>" in page
    outside = re.findall(r"(?:src|href)=\"(?!#|data:)", page) + re.findall(r"url\(", page)
    assert outside == ["url("]  # the clip path of a chart: url(#id)
    assert re.findall(r"https?://[^\"'` ]+", page) == ["http://www.w3.org/2000/svg"]
