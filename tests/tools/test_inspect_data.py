"""The program: its report, and its exit for data that it cannot read."""

from pathlib import Path

import pytest

from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.inspection import printable
from tests.data.small_text import NUMBERS, small_bpe, write_texts
from tools.inspect_data import main

TEXTS = ["the expert\nreads", "x" * 50, "naïve 漢字", *(f"text {i}" for i in range(16)), "x" * 50]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The prefix of a dataset of 20 documents, one of them twice."""
    bpe = small_bpe()
    bpe.save(tmp_path / "tokenizer")
    write_texts(tmp_path / "my", TEXTS, bpe, sources=("in\x1b.jsonl",))
    return tmp_path / "my"


def lines(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """What is printed, without the indent."""
    capsys.readouterr()
    assert main([str(word) for word in arguments]) == 0
    return [
        line[2:] if line.startswith("  ") else line for line in capsys.readouterr()[0].split("\n")
    ]


def test_the_report(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bpe = small_bpe()
    length = [len(bpe.tokenize(text)) + 1 for text in TEXTS]
    tokenizer = ("--tokenizer-model", data.parent / "tokenizer")
    found = lines(capsys, data, *tokenizer, "--documents", 0, 1, 2, "--characters", 20)
    assert found == [
        str(data),
        f"20 documents, {sum(length)} tokens of type uint16",
        f"tokenizer {bpe.fingerprint[:12]}",
        "source in\\x1b.jsonl",
        f"last token {bpe.eod}, the end of document: 20 documents",
        found[5],
        "1 repeated document (5.0%); document 1 occurs 2 times",
        f"document 0, {length[0]} tokens:",
        "  | the expert",
        "  | reads<|en ...",
        f"document 1, {length[1]} tokens:",
        "  | " + "x" * 20 + " ...",
        f"document 2, {length[2]} tokens:",
        "  | naïve 漢字<|endoftext| ...",
        "",
    ]
    ids = lines(capsys, data, "--documents", 2)[-2]
    assert ids.split()[1:] == [str(i) for i in [*bpe.tokenize("naïve 漢字"), bpe.eod]]


def test_lengths_and_ends_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [1] * 45 + [3] * 30 + [10] * 24
    documents = [[7] * (n - 1) + [999] for n in lengths] + [[7] * 1000]
    write_indexed(tmp_path / "data", documents, NUMBERS.vocab_size)
    found = lines(capsys, tmp_path / "data", "--tokenizer-type", "NullTokenizer",
                  "--vocab-size", 1000)  # fmt: skip
    assert "last token 999, the end of document: 99 documents" in found
    assert (
        "tokens per document: mean 13.8, shortest 1, 1% 1, 25% 1, median 3, 75% 3, 99% 10, "
        "longest 1,000"
    ) in found
    Path(f"{tmp_path}/data.manifest.json").unlink()
    found = lines(capsys, tmp_path / "data")
    assert "no manifest: the tokenizer and the sources are unknown" in found


def test_repeats_are_found_with_and_without_the_end_and_in_any_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_indexed(tmp_path / "a", [[1, 2, 9], [3, 9], [1, 2], [3, 9], [3, 9], [2, 1, 9]], 10)
    write_indexed(tmp_path / "b", [[5, 99_999], [3, 99_999]], 100_000)  # int32
    found = lines(capsys, tmp_path / "a", tmp_path / "b")
    assert "3 repeated documents (50.0%); document 1 occurs 3 times" in found
    assert "0 repeated documents (0.0%)" in found
    assert f"1 document (50.0%) also in {tmp_path / 'a'}" in found


def test_control_characters_are_shown_not_sent() -> None:
    assert printable("a\x1b[2Jb\r\n\x07é漢\u202e") == "a\\x1b[2Jb\\r\n\\x07é漢\\u202e"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--samples", "-1"], "--samples -1"),
        (["--documents", "20"], "has 20; give a number from 0 to 19"),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "300"], "another tokenizer"),
        (["nowhere"], "nowhere.idx is missing"),
    ],
)
def test_what_it_cannot_use_is_one_line_and_code_2(
    data: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(more if more == ["nowhere"] else [str(data), *more]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
