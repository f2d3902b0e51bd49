"""The program: its files, their part of the report, and its errors."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from moe_parallel.analysis.report.text_entry import text_entry
from moe_parallel.analysis.routing.folder import read_manifest, read_table
from moe_parallel.data.tokenizer import load_tokenizer
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data
from tests.tools.running import run_tool_forked
from tests.tools.test_report import data_of
from tools.analyze import main
from tools.report import main as report

run = partial(run_tool_forked, "analyze.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analyze")
    options = SMALL | small_data(folder) | {"save": folder / "run", "expert_selection": "top_p"}
    run_distributed(1, pretrain_here, [options])
    return folder / "run"


@pytest.fixture(scope="module")
def analyzed(trained: Path) -> list[str]:
    """The lines of an analysis of the held-out text."""
    weights = {path: path.read_bytes() for path in trained.glob("iter_*/**/*") if path.is_file()}
    done = run("--load", trained, "--permutations", 19, "--view-tokens", 40)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert all(path.read_bytes() == content for path, content in weights.items())
    return done.stdout.splitlines()


def test_the_files_agree(trained: Path, analyzed: list[str]) -> None:
    folder = trained / "analysis"
    assert analyzed[-1] == str(folder) and analyzed[0].startswith("cycle: ")
    assert {path.name for path in folder.iterdir()} == {
        "analysis.json", "layers.parquet", "loads.parquet", "pairs.parquet", "selections.parquet",
        "specialization.parquet", "view.parquet", "vocabulary.parquet",
    }  # fmt: skip
    facts = read_manifest(folder)
    assert list(facts["tokens"]) == ["cycle", "noise"] and facts["layers"] == [1, 2]
    rows = read_table(folder, "selections")
    assert len(rows["text"]) == 2 * sum(facts["tokens"].values())
    choices = np.zeros((2, 4))
    for text, layer, experts in zip(rows["text"], rows["layer"], rows["experts"], strict=True):
        if text == "noise":
            choices[layer - 1, experts] += 1
    loads = read_table(folder, "loads")
    noise = [n for text, n in zip(loads["text"], loads["tokens"], strict=True) if text == "noise"]
    assert noise == choices.ravel().tolist()
    vocabulary = read_table(folder, "vocabulary")
    assert sum(vocabulary["occurrences"]) == sum(facts["tokens"].values())
    tokenizer = load_tokenizer(trained / "tokenizer")
    view = read_table(folder, "view")
    assert view["text"] == ["cycle"] * 40 + ["noise"] * 40
    assert view["piece"] == [tokenizer.detokenize([item]) for item in view["token"]]


def test_the_report_shows_it(trained: Path, analyzed: list[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert report([str(trained), "--output", str(page)]) == 0
    (entry,) = data_of(page.read_text(encoding="utf-8"))["runs"]
    text = entry["text"]
    assert text == text_entry(trained / "analysis")
    assert [each["name"] for each in text["texts"]] == ["cycle", "noise"]
    assert [test["layer"] for test in text["tests"]] == [1, 2, None]
    assert all(1 / 20 <= test["p"] <= 1 for test in text["tests"])
    means = np.array(text["experts_per_token"])
    assert means.shape == (2, 2) and (means >= 1).all() and (means <= 4).all()
    assert text["pairs"]["shape"] == [2, 4, 4] and len(text["view"][0]["pieces"]) == 40
    (start,) = entry["starts"]
    assert start["ranks"] == 1 and start["versions"]["megatron-core"]
    lines = [json.loads(line) for line in (trained / "starts.jsonl").read_text().splitlines()]
    assert lines == [start]


@pytest.mark.full
def test_given_files_replace_the_analysis(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four " * 30)
    (tmp_path / "b.jsonl").write_text('{"text": "seven seven"}\n' * 20)
    output = tmp_path / "new" / "analysis"
    flags = ["--load", trained, "--output", output, "--totals-only", "--permutations", 9]
    done = run(*flags, "--text", tmp_path / "a.txt", f"letters={tmp_path / 'b.jsonl'}")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert list(read_manifest(output)["tokens"]) == ["a", "letters"]
    assert not (output / "selections.parquet").exists()
    done = run(*flags, "--samples", 1, "--text", tmp_path / "a.txt")
    assert done.returncode == 0, done.stderr
    assert read_manifest(output)["tokens"] == {"a": SMALL["seq_length"]}
    assert text_entry(output)["tests"] == []
    assert [path.name for path in output.parent.iterdir()] == ["analysis"]
    empty = tmp_path / "broken.txt"
    empty.write_bytes(b"\xff")
    done = run(*flags, "--text", empty)
    assert done.returncode == 2 and "broken.txt is not UTF-8" in done.stderr
    assert done.stderr.count("\n") == 1
    assert read_manifest(output)["tokens"] == {"a": SMALL["seq_length"]}  # the earlier one is whole


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--load is not set"),
        (["--load", "x", "--samples", "0"], "--samples is 0: it must be at least 1"),
        (["--load", "x", "--permutations", "few"], "--permutations: invalid int value"),
        (["--load", "nowhere"], "--load nowhere: there is no such folder"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    said = capsys.readouterr().err
    assert said.startswith("analyze.py: ") and message in said and said.count("\n") == 1


def test_wrong_texts_and_folders(trained: Path, tmp_path: Path, capsys) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    one, other = tmp_path / "a.txt", tmp_path / "x" / "a.txt"
    other.parent.mkdir()
    for file in (one, other):
        file.write_text("one")
    for flags, message in [
        (["--text", tmp_path / "gone.txt"], "gone.txt: there is no such file"),
        (["--text", one, other], "another text is called a: give NAME=FILE"),
        (["--text", f"={one}"], "the name before = is empty"),
        (["--output", full], "exists and is no analysis: name another folder"),
    ]:
        assert main(["--load", str(trained), *map(str, flags)]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, said
    assert [path.name for path in full.iterdir()] == ["mine"]
