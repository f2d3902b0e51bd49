"""The program: its output, and its exit for a line that it cannot use."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.tools.running import run_tool, run_tool_forked

run = partial(run_tool, "preprocess_data.py")
run_forked = partial(run_tool_forked, "preprocess_data.py")


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.full
def test_prints_what_it_wrote_and_no_warning(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", "1 2 3", "4")
    result = run(
        "--input", source, "--output-prefix", tmp_path / "my", "--append-eod",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", 9,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{tmp_path}/my_text_document: 2 documents, 6 tokens\n"


def test_help() -> None:
    result = run("--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--append-eod" in result.stdout


@pytest.mark.parametrize("word", ["9", "-1", "nine"])
def test_a_word_that_is_no_token_is_one_line_and_code_2(tmp_path: Path, word: str) -> None:
    source = write(tmp_path / "in.jsonl", "1 2 3", f"4 {word}")
    result = run_forked(
        "--input", source, "--output-prefix", tmp_path / "my",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", 9,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: --input {source} line 2: --tokenizer-type NullTokenizer reads numbers from 0 to 8 "
        f"(--vocab-size 9), not '{word}': raise --vocab-size, or name another tokenizer\n"
    )
    assert list(tmp_path.iterdir()) == [source]
