"""The flags of tools/preprocess_data.py, in this process: tokenizers, and what exists already."""

import json
import re
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from moe_parallel.data.indexed import read_manifest
from moe_parallel.data.tokenizer import load_tokenizer
from tests.data.small_text import small_bpe, words
from tools.preprocess_data import main


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_the_tool_trains_a_tokenizer_and_writes_what_megatron_reads(tmp_path: Path) -> None:
    texts = [words(20, seed) for seed in range(40)]
    source = write(tmp_path / "in.jsonl", *({"text": t, "title": t[:9]} for t in texts))
    prefix = tmp_path / "out" / "my"
    arguments = ["--input", source, "--output-prefix", prefix, "--vocab-size", "300"]
    arguments += ["--json-keys", "text", "title", "--append-eod"]
    assert main([str(word) for word in arguments]) == 0
    tokenizer = load_tokenizer(Path(f"{prefix}_tokenizer"))
    assert tokenizer.vocab_size == 300
    written = documents(Path(f"{prefix}_text_document"))
    assert {ids[-1] for ids in written} == {tokenizer.eod}
    assert [tokenizer.detokenize(ids[:-1]) for ids in written] == texts
    titles = documents(Path(f"{prefix}_title_document"))
    assert [tokenizer.detokenize(ids[:-1]) for ids in titles] == [t[:9] for t in texts]


def test_the_tool_uses_a_tokenizer_that_is_there(tmp_path: Path) -> None:
    bpe = small_bpe()
    bpe.save(tmp_path / "tokenizer")
    source = write(tmp_path / "in.jsonl", {"text": "the expert"})
    arguments = ["--input", source, "--output-prefix", tmp_path / "my"]
    arguments += ["--tokenizer-model", tmp_path / "tokenizer"]
    assert main([str(word) for word in arguments]) == 0
    assert documents(tmp_path / "my_text_document") == [bpe.tokenize("the expert")]
    assert not (tmp_path / "my_tokenizer").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([], "or --vocab-size to train a new one"),
        (["--vocab-size", "300"], "line 2: not JSON"),
        (["--vocab-size", "20"], "--vocab-size 20 is too small"),
        (["--tokenizer-type", "Nul"], "--tokenizer-type Nul is unknown"),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"], "line 2: not JSON"),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "3"], "line 1: --tokenizer-type"),
        (["--vocab-size", "300", "--workers", "0"], "--workers is 0: it must be at least 1"),
    ],
)
def test_the_tool_ends_with_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "1 2 3"})
    with source.open("a") as stream:
        stream.write("{\n")
    before = sorted(tmp_path.iterdir())
    prefix = str(tmp_path / "my")
    assert main(["--input", str(source), "--output-prefix", prefix, *extra]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message in error[0]
    assert sorted(tmp_path.iterdir()) == before


def test_an_empty_or_missing_input_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").touch()
    small_bpe().save(tmp_path / "tokenizer")
    for name, message in (("empty", "there is no text to write"), ("missing", "cannot be read")):
        arguments = ["--input", tmp_path / f"{name}.jsonl", "--output-prefix", tmp_path / "my"]
        arguments += ["--tokenizer-model", tmp_path / "tokenizer"]
        assert main([str(word) for word in arguments]) == 2
        assert message in capsys.readouterr().err


def test_an_input_without_text_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = write(tmp_path / "empty.jsonl")
    half = write(tmp_path / "half.jsonl", {"text": "one two", "title": ""})
    for source in (empty, half):
        arguments = ["--input", source, "--output-prefix", tmp_path / "my", "--vocab-size", "300"]
        arguments += ["--json-keys", "text", "title"]
        assert main([str(word) for word in arguments]) == 2
        assert re.fullmatch(r"error: there is no text to write .*\n", capsys.readouterr().err)
        assert sorted(tmp_path.iterdir()) == [empty, half]


def test_what_is_there_is_not_overwritten_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", {"text": words(90, 1)})
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "my")]
    arguments += ["--vocab-size", "300"]
    assert main(arguments) == 0
    write(source, {"text": words(90, 2)})
    capsys.readouterr()

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(tmp_path.rglob("my*")) if path.is_file()}

    before = files()
    assert main(arguments) == 2
    assert re.fullmatch(r"error: \S*my_text_document\.bin exists: .*--overwrite\n", _err(capsys))
    for suffix in ("bin", "idx"):
        (tmp_path / f"my_text_document.{suffix}").rename(tmp_path / f"kept.{suffix}")
    assert main(arguments) == 2
    assert re.fullmatch(r"error: \S*my_tokenizer exists: .*--overwrite\n", _err(capsys))
    for suffix in ("bin", "idx"):
        (tmp_path / f"kept.{suffix}").rename(tmp_path / f"my_text_document.{suffix}")
    assert files() == before
    assert main([*arguments, "--overwrite"]) == 0
    assert not list(tmp_path.glob(".*"))
    after = files()
    assert after.keys() == before.keys()
    tokenizer = load_tokenizer(tmp_path / "my_tokenizer")
    manifest = read_manifest(tmp_path / "my_text_document")
    assert manifest is not None and manifest.tokenizer == tokenizer.fingerprint
    assert [tokenizer.detokenize(ids) for ids in documents(tmp_path / "my_text_document")] == [
        words(90, 2)
    ]


def _err(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_a_vocabulary_that_comes_out_smaller_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "ab ab"})
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "my")]
    assert main([*arguments, "--vocab-size", "1000000"]) == 0
    assert "259 tokens, fewer than --vocab-size 1,000,000: the text" in capsys.readouterr().out
    assert main([*arguments, "--vocab-size", "259", "--overwrite"]) == 0
    assert "259 tokens\n" in capsys.readouterr().out
