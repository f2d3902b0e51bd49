"""Preprocessing against Megatron-LM's script: a stand-in takes its place, with the same flags."""

import json
from pathlib import Path

import pytest

from tests.tools.running import run_tool_forked
from tools.bench.preprocessors import Cost, Preprocessor, TextRun, same_bytes, table

# Megatron-LM's script by its flags, with our own work. It writes other bytes if it is told so.
STAND_IN = """
import argparse, os, sys

parser = argparse.ArgumentParser()
for flag in ("input", "tokenizer-type", "tokenizer-model", "output-prefix", "workers"):
    parser.add_argument(f"--{flag}", required=True)
parser.add_argument("--json-keys", nargs="+", required=True)
parser.add_argument("--append-eod", action="store_true")
own = parser.parse_args()
assert own.tokenizer_type == "HuggingFaceTokenizer"
sys.path.insert(0, PROJECT)
from moe_parallel.data.indexed_writer import write_indexed
from moe_parallel.data.tokenizer import load_tokenizer
from pathlib import Path
import json

tokenizer = load_tokenizer(Path(own.tokenizer_model))
texts = [json.loads(line)["text"] for line in open(own.input)]
documents = [[*tokenizer.tokenize(text), tokenizer.eod] for text in texts]
write_indexed(Path(own.output_prefix + "_text_document"), documents[SKIP:], tokenizer.vocab_size)
"""


def stand_in(folder: Path, skip: int = 0, script: str = STAND_IN) -> Path:
    (folder / "tools").mkdir(parents=True)
    project = repr(str(Path(__file__).resolve().parents[2]))
    text = script.replace("PROJECT", project).replace("SKIP", str(skip))
    (folder / "tools" / "preprocess_data.py").write_text(text)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.jsonl"
    words = [" ".join(f"word{i * j % 97}" for j in range(60)) for i in range(30)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in words))
    return file


@pytest.mark.parametrize("skip", [0, 1])
def test_both_scripts_are_run_in_turns_and_their_bytes_compared(
    tmp_path: Path, text: Path, skip: int
) -> None:
    megatron = stand_in(tmp_path / "megatron", skip)
    told = run_tool_forked(
        "bench/preprocessing.py", "--megatron-lm", megatron, "--input", text, "--vocab-size", 400,
        "--workers", 1, "--turns", 2, "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("DIFFER") == (2 if skip else 0)
    content = json.loads((tmp_path / "out.json").read_text())
    names = [run["name"] for run in content["runs"]]
    assert names == ["this project", "Megatron-LM", "Megatron-LM", "this project"]
    assert content["about"]["text_bytes"] == text.stat().st_size
    for run in content["runs"]:
        assert run["whole"]["cpu_seconds"] > 0
        assert run["start"]["cpu_seconds"] > 0


def test_a_script_that_fails_is_told_with_its_last_line(tmp_path: Path, text: Path) -> None:
    megatron = stand_in(tmp_path / "megatron", script="raise SystemExit('no transformers here')")
    told = run_tool_forked(
        "bench/preprocessing.py", "--megatron-lm", megatron, "--input", text, "--vocab-size", 400,
        "--workers", 1,
    )  # fmt: skip
    assert told.returncode == 2
    assert told.stderr == "preprocessing.py: Megatron-LM failed: no transformers here\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--megatron-lm {} has no tools/preprocess_data.py: clone Megatron-LM there"),
        (["--workers", 0], "--workers has 0: it must be at least 1"),
        (["--turns", 0], "--turns is 0: it must be at least 1"),
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, flags: list[object], message: str) -> None:
    told = run_tool_forked("bench/preprocessing.py", "--megatron-lm", tmp_path, *flags)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == f"preprocessing.py: {message.format(tmp_path)}\n"


def test_text_without_the_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"content": "a"}\n')
    megatron = stand_in(tmp_path / "megatron")
    told = run_tool_forked(
        "bench/preprocessing.py", "--megatron-lm", megatron, "--input", tmp_path / "text.jsonl"
    )
    assert told.returncode == 2
    assert told.stderr.startswith("preprocessing.py: --input has a line that is no record with a ")


def run(name: str, whole: float, start: float, workers: int = 1) -> TextRun:
    return TextRun(name, workers, Cost(whole, whole), Cost(start, start))


def test_the_start_does_not_count_and_ratios_are_those_of_a_turn() -> None:
    """The second turn ran on a machine at half its speed."""
    contenders = [Preprocessor("ours", Path(), []), Preprocessor("theirs", Path(), [])]
    runs = [run("ours", 3, 1), run("theirs", 12, 10), run("theirs", 24, 20), run("ours", 6, 2)]
    lines = table(contenders, runs, 6_000_000).splitlines()
    assert lines[2].split() == ["1", "ours", "3.0", "1.5", "2.00", "4.5"]
    assert lines[3].endswith("ours 1.00x: met (goal >= 0.8x)")
    slower = [run("ours", 5, 1), run("theirs", 13, 10)]
    assert table(contenders, slower, 10**6).endswith("ours 0.75x: missed (goal >= 0.8x)")
    nothing = [run("ours", 1, 1), run("theirs", 13, 10)]
    assert "the text is too short" in table(contenders, nothing, 10**6)


def test_datasets_are_the_same_only_in_both_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for end in ("bin", "idx"):
            (tmp_path / f"{name}_text_document.{end}").write_bytes(b"x")
    assert same_bytes(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b_text_document.idx").write_bytes(b"y")
    assert not same_bytes(tmp_path / "a", tmp_path / "b")
