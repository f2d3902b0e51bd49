"""The program: its page and its errors, without torch."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.analysis.report.folders import (
    analysis_folder,
    run_folder,
    scaling_folder,
)
from tests.analysis.study_folder import make_study, plausible_records, write_cell
from tools.report import main

ROOT = Path(__file__).resolve().parents[2]


def data_of(page: str) -> dict:
    text = page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    return json.loads(text)


def test_a_page_about_everything(tmp_path, capsys):
    starts = [{"command": "python a.py", "ranks": 1}, {"command": "python b.py", "ranks": 2}]
    run = run_folder(tmp_path / "run", starts=starts)
    old = run_folder(tmp_path / "old <b>", options={"expert-selection": "topk"})
    records = [{"iteration": 7, "validation": {"a": {"loss": 2.5}}}]
    sources = [run, old, run_folder(tmp_path / "evaluated", records)]
    sources.append(scaling_folder(tmp_path / "s"))
    output = tmp_path / "new" / "page.html"
    assert main([*map(str, sources), "--output", str(output)]) == 0
    assert capsys.readouterr().out.startswith(f"{output} (0.")
    page = output.read_text(encoding="utf-8")
    assert "old &lt;b&gt;" in page and "old <b>" not in page
    data = data_of(page)
    one, other, evaluated = data["runs"]
    assert (one["name"], one["facts"]["system"]) == ("run", "aoe")
    assert [start["command"] for start in one["starts"]] == ["python a.py", "python b.py"]
    assert other["starts"] == []
    assert one["options"]["train-iters"] == "300"
    assert (evaluated["curves"], evaluated["routing"]) == ({"loss/a": {"x": [7], "y": [2.5]}}, None)
    assert data["command"].startswith("python tools/report.py ")
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]


def test_the_page_of_one_folder_is_in_it(tmp_path, capsys, monkeypatch):
    run, study = run_folder(tmp_path / "run"), scaling_folder(tmp_path / "s")
    monkeypatch.chdir(tmp_path)
    for sources, place in [([run], "run/report.html"), ([run, study], "report.html")]:
        assert main([*map(str, sources)]) == 0
        assert (tmp_path / place).is_file() and f"{place} (0." in capsys.readouterr().out
        (tmp_path / place).unlink()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        ({}, "has no metrics.jsonl"),
        ({"metrics.jsonl": ""}, "is empty: let the run reach"),
        ({"metrics.jsonl": "x\n"}, "line 1 is damaged"),
        ({"metrics.jsonl": '{"iteration": 1}', "config.yaml": "a: [b"}, "is not valid YAML"),
        ({"metrics.jsonl": '{"iteration": 1, "lm_loss": 1}'}, "has lines in another form"),
        ({"metrics.jsonl": '{"iteration": 1, "validation": [2]}'}, "has lines in another form"),
        ({"metrics.jsonl": '{"iteration": 1}', "analysis/analysis.json": "{}"}, "fit together"),
        ({"metrics.jsonl": '{"iteration": 1}', "analysis/x": ""}, "analysis.json cannot be read"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_code_2(tmp_path, capsys, write, message):
    for name, text in write.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert main([str(tmp_path), "--output", str(tmp_path / "r.html")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("report.py: ") and message in said and said.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run = run_folder(folder / "run", starts=[{"ranks": 1}])
    analysis_folder(run / "analysis")
    study = make_study(folder / "study", ["topk"])
    write_cell(study.cell("topk", 1), plausible_records("fixed", 1, logged=4))
    scaling_folder(folder / "scaling")
    sources = [run, study.path, folder / "scaling"]
    assert main([*map(str, sources), "--output", str(folder / "r.html")]) == 0
    return folder


@pytest.mark.parametrize("damage", ["deep", "large", "a list in itself", "/dev/zero", "a pipe"])
@pytest.mark.parametrize(
    "name",
    [
        "run/metrics.jsonl", "run/config.yaml", "run/starts.jsonl", "scaling/scaling.csv",
        "run/analysis/analysis.json", "study/study.json",
        "run/analysis/loads.parquet", "study/cells/topk/seed-1/metrics.jsonl",
    ],
)  # fmt: skip
def test_a_file_without_bounds_is_one_line_or_left_out(whole, tmp_path, capsys, name, damage):
    folder = shutil.copytree(whole / Path(name).parts[0], tmp_path / "copy")
    file = folder / name.partition("/")[2]
    content = file.read_bytes()
    file.unlink()
    if damage == "a pipe":
        os.mkfifo(file)
    elif damage == "/dev/zero":
        file.symlink_to(damage)
    elif damage == "large":
        file.write_bytes(re.sub(rb"(?<=[ ,])[0-9]+", b"1" + b"0" * 400, content, count=3))
    else:
        file.write_text("[" * 5_000 + "]" * 5_000 if damage == "deep" else "a: &a [*a]")
    code = main([str(folder), "--output", str(tmp_path / "r.html")])
    said = capsys.readouterr().err
    assert (code, said.count("\n")) in ((0, 0), (2, 1)), said
    if not code:
        data_of((tmp_path / "r.html").read_text(encoding="utf-8"))


def test_nothing_of_torch_is_imported(tmp_path):
    flags = [str(run_folder(tmp_path / "run")), "--output", str(tmp_path / "r.html")]
    script = (
        f"import sys; from tools.report import main\nassert main({flags!r}) == 0\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron', 'pyarrow')])"
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
