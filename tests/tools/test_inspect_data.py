"""The program: its report, and its exit for data that it cannot read."""

import json
from pathlib import Path

import pytest

from tests.data.small_text import small_bpe, words
from tests.tools.running import run_tool
from tools.inspect_data import main as inspect_data
from tools.preprocess_data import main as preprocess_data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The prefix of a dataset of 20 documents, one of them twice, in two domains."""
    small_bpe().save(tmp_path / "tokenizer")
    texts = [words(10, seed) for seed in range(19)]
    for name, part in (("code", texts[:5]), ("prose", texts[5:] + texts[3:4])):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        (tmp_path / name / "in.jsonl").write_text("".join(lines))
    line = ["--input", tmp_path / "code", tmp_path / "prose", "--output-prefix", tmp_path / "my"]
    line += ["--tokenizer-model", tmp_path / "tokenizer", "--append-eod"]
    assert preprocess_data([str(word) for word in line]) == 0
    return tmp_path / "my_text_document"


def inspect(*arguments: object) -> int:
    return inspect_data([str(word) for word in arguments])


def test_the_report(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    tokenizer = data.parent / "tokenizer"
    code = inspect(data, "--tokenizer-model", tokenizer, "--documents", 3, "--check-sources")
    assert code == 0
    printed = capsys.readouterr().out
    lines = [line.strip() for line in printed.splitlines()]
    assert lines[0] == str(data)
    assert lines[1].startswith("20 documents, ")
    assert f"tokenizer {small_bpe().fingerprint[:12]}" in lines
    assert [line.split(":")[0] for line in lines if line.startswith("domain ")] == [
        "domain code", "domain prose",
    ]  # fmt: skip
    assert "1 repeated document (5.0%); document 3 occurs 2 times" in lines
    first, *rest = words(10, 3).split("\n")
    assert f"  document 3, {len(small_bpe().tokenize(words(10, 3))) + 1} tokens:\n" in printed
    assert f"    | {first}".replace("\t", "\\t") in printed
    assert lines[-1] == "source files are unchanged"


def test_a_source_that_changed_is_told(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, prose = (data.parent / name / "in.jsonl" for name in ("code", "prose"))
    content = code.read_bytes()
    code.write_bytes(content.replace(b"a", b"b"))
    prose.unlink()
    assert inspect(data, "--check-sources") == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"  source {code} has other content",
        f"  source {prose} cannot be read (No such file or directory)",
    ]
    code.write_bytes(content + b"\n")
    assert inspect(data, "--check-sources") == 1
    size = len(content)
    assert f"{code} has {size + 1:,} bytes, not {size:,}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--samples", "-1"], "--samples -1"),
        (["--characters", "0"], "--characters is 0: it must be at least 1"),
        (["--documents", "20"], "has 20; give a number from 0 to 19"),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "300"], "another tokenizer"),
        (["--tokenizer-type", "NullTokenizer"], "NullTokenizer needs --vocab-size"),
        (["nowhere"], "nowhere.idx is missing"),
    ],
)
def test_what_it_cannot_use_is_one_line_and_code_2(
    data: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    capsys.readouterr()
    assert inspect(*(more[:1] if more == ["nowhere"] else [data, *more])) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_data_of_megatrons_own(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{data}.manifest.json").unlink()
    assert inspect(data) == 0
    assert "no manifest: the tokenizer, the sources" in capsys.readouterr().out
    assert inspect(data, "--check-sources") == 2
    assert "has no manifest that names source files" in capsys.readouterr().err


@pytest.mark.full
def test_prints_no_warning(data: Path) -> None:
    result = run_tool("inspect_data.py", data)
    assert (result.returncode, result.stderr) == (0, "")
