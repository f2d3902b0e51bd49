"""The program: its files, their part of the report, and its errors."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from moe_parallel.analysis.report.text_entry import text_entry
from moe_parallel.analysis.routing import read_facts, read_table
from moe_parallel.data.tokenizer import load_tokenizer
from moe_parallel.training.routing_analysis import AnalysisOptions, analyze
from moe_parallel.training.standalone import evaluation_config, standalone_config
from tests.distributed import run_distributed
from tests.program import SMALL, Program, flags, pretrain_here, small_data
from tests.tiers import selected_values
from tests.tools.running import ROOT, run_tool_forked
from tests.tools.test_report import data_of
from tools.analyze import main
from tools.report import main as report

run = partial(run_tool_forked, "analyze.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analyze")
    of_run = SMALL | small_data(folder) | {"save": folder / "run", "expert_selection": "top_p"}
    run_distributed(1, pretrain_here, [of_run])
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
    facts = read_facts(folder)
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


LAYOUTS = {
    "dp": {},
    "pp": {"pipeline_model_parallel_size": 2},
    "tp": {"tensor_model_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
    "tp, ep": {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 2,
    },
}


def _analyze_in(load: Path, folders: dict[str, Path]) -> list[list[str]]:
    """As the tool does on each rank, for each layout."""
    config = standalone_config([], load=str(load))
    options = AnalysisOptions({}, None, 19, 40, True, "")
    lines = []
    for layout, folder in folders.items():
        line = flags(LAYOUTS[layout])
        on_ranks = evaluation_config(line, str(load), dist.get_world_size())
        lines.append(analyze(config, on_ranks, options, folder))
    return lines


def assert_same(found: Path, expected: Path) -> None:
    assert read_facts(found) | {"command": ""} == read_facts(expected) | {"command": ""}
    for path in expected.glob("*.parquet"):
        table = read_table(found, path.stem)
        for name, column in read_table(expected, path.stem).items():
            if name == "weights":
                column = [pytest.approx(each, rel=1e-4) for each in column]
            elif isinstance(column[0], float):
                column = pytest.approx(column, rel=1e-4, abs=1e-6)
            assert table[name] == column, (path.stem, name)


@pytest.fixture(scope="module")
def in_layouts(
    request: pytest.FixtureRequest, trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the analysis in each layout whose test runs."""
    folder = tmp_path_factory.mktemp("layouts")
    wanted = {name: folder / name for name in selected_values(request, "layout", LAYOUTS)}
    lines, of_rank_1 = run_distributed(2, _analyze_in, trained, wanted)
    assert all(lines) and of_rank_1 == [[]] * len(wanted)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, in_layouts: Path, trained: Path, analyzed: list[str]) -> None:
    assert_same(in_layouts / layout, trained / "analysis")


@pytest.mark.full
def test_the_program_on_two_ranks(trained: Path, analyzed: list[str], tmp_path: Path) -> None:
    line = ["--load", trained, "--permutations", 19, "--view-tokens", 40]
    line += ["--expert-model-parallel-size", 2, "--output", tmp_path / "out"]
    script = ROOT / "tools/analyze.py"
    with Program(tmp_path, 2, [str(word) for word in line], script=script) as program:
        assert program.finish() == 0, program.output
    assert program.output.splitlines() == [*analyzed[:-1], str(tmp_path / "out")]
    assert_same(tmp_path / "out", trained / "analysis")


@pytest.mark.full
def test_given_files_replace_the_analysis(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four " * 30)
    (tmp_path / "b.jsonl").write_text('{"text": "seven seven"}\n' * 20)
    output = tmp_path / "new" / "analysis"
    line = ["--load", trained, "--output", output, "--totals-only", "--permutations", 9]
    done = run(*line, "--text", tmp_path / "a.txt", f"letters={tmp_path / 'b.jsonl'}")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert list(read_facts(output)["tokens"]) == ["a", "letters"]
    assert not (output / "selections.parquet").exists()
    done = run(*line, "--samples", 1, "--text", tmp_path / "a.txt")
    assert done.returncode == 0, done.stderr
    assert read_facts(output)["tokens"] == {"a": SMALL["seq_length"]}
    assert text_entry(output)["tests"] == []
    assert [path.name for path in output.parent.iterdir()] == ["analysis"]
    empty = tmp_path / "broken.txt"
    empty.write_bytes(b"\xff")
    done = run(*line, "--text", empty)
    assert done.returncode == 2 and "broken.txt is not UTF-8" in done.stderr
    assert done.stderr.count("\n") == 1
    assert read_facts(output)["tokens"] == {"a": SMALL["seq_length"]}  # the earlier one is whole


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--load is not set"),
        (["--load", "x", "--samples", "0"], "--samples is 0: it must be at least 1"),
        (["--load", "x", "--permutations", "few"], "--permutations: invalid int value"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_wrong_texts_and_folders(trained: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    one, other = tmp_path / "a.txt", tmp_path / "x" / "a.txt"
    other.parent.mkdir()
    for file in (one, other):
        file.write_text("one")
    nowhere = tmp_path / "nowhere"
    for words, message in [
        (["--load", nowhere], "nowhere: there is no such folder"),
        (["--text", tmp_path / "gone.txt"], "gone.txt: there is no such file"),
        (["--text", one, other], "another text is called a: give NAME=FILE"),
        (["--text", f"={one}"], "the name before = is empty"),
        (["--output", full], "exists and is not an analysis: name another folder"),
    ]:
        done = run("--load", trained, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert [path.name for path in full.iterdir()] == ["mine"]
