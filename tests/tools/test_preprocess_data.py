"""The program: what it prints, and how it ends on a line that it cannot use."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/preprocess_data.py", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


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
    result = run(
        "--input", source, "--output-prefix", tmp_path / "my",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", 9,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: --input {source} line 2: --tokenizer-type NullTokenizer reads numbers from 0 to 8 "
        f"(--vocab-size 9), not '{word}': raise --vocab-size, or name another tokenizer\n"
    )
    assert list(tmp_path.iterdir()) == [source]
