"""Whole runs in this process; the program's exits are in tests/tools."""

import bz2
import gzip
import json
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import pyarrow
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from pyarrow import parquet

from moe_parallel.data import preprocess as preprocess_module
from moe_parallel.data.indexed import read_manifest
from moe_parallel.data.preprocess import preprocess
from moe_parallel.data.tokenizer import load_tokenizer
from moe_parallel.errors import InputError
from tests.data.small_text import small_bpe, words


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


TEXTS = [words(i % 50, i) for i in range(300)]
RECORDS = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]


def work(folder: Path, *inputs: Path, name: str = "out", **changes: object) -> list[str]:
    """Tokenizing with the small BPE; `changes` are flags."""
    if not (folder / "tokenizer").exists():
        small_bpe().save(folder / "tokenizer")
    fields: dict[str, object] = {
        "input": [str(path) for path in inputs],
        "json_keys": ["text"],
        "output_prefix": str(folder / name / "my"),
        "tokenizer_type": "ByteLevelBPE",
        "tokenizer_model": str(folder / "tokenizer"),
        "vocab_size": None,
        "append_eod": True,
        "overwrite": False,
        "workers": 1,
        "max_bad": 0,
    }
    return preprocess(Namespace(**{**fields, **changes}), lambda *_: nullcontext(lambda _: None))


def test_every_format_gives_the_same_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess_module, "_BATCH", 1000)  # tens of batches
    plain = write(tmp_path / "in.jsonl", *RECORDS)
    first = write(tmp_path / "first.jsonl", *RECORDS[:150])
    rows = pyarrow.Table.from_pylist(RECORDS)
    (tmp_path / "halves").mkdir()
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number:03}.txt").write_bytes(text.encode())
    for name, pack in (
        ("in.jsonl.gz", gzip.compress),
        ("in.jsonl.bz2", bz2.compress),
        ("in.jsonl.zst", lambda data: pyarrow.compress(data, "zstd", asbytes=True)),
        ("halves/1.jsonl.gz", gzip.compress),
    ):
        content = (first if name.startswith("halves") else plain).read_bytes()
        (tmp_path / name).write_bytes(pack(content))
    parquet.write_table(rows, tmp_path / "in.parquet", row_group_size=70)
    parquet.write_table(rows[150:], tmp_path / "halves/2.parquet", row_group_size=70)
    bpe, found = small_bpe(), set()
    for name in ("in.jsonl", "in.jsonl.gz", "in.jsonl.bz2", "in.jsonl.zst", "in.parquet", "halves",
                 "texts"):  # fmt: skip
        path, prefix = tmp_path / name, tmp_path / "out" / name / "my_text_document"
        work(tmp_path, path, name=f"out/{name}")
        found.add(tuple(Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")))
        manifest = read_manifest(prefix)
        assert manifest is not None and manifest.tokenizer == bpe.fingerprint
        sources = sorted(path.iterdir()) if path.is_dir() else [path]
        assert manifest.sources == tuple(map(str, sources))
    assert len(found) == 1
    kept = [text for text in TEXTS if text]
    assert documents(prefix) == [[*bpe.tokenize(text), bpe.eod] for text in kept]


def test_a_tokenizer_is_trained_on_all_keys(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *({"a": "one two", "b": text} for text in TEXTS[:40]))
    lines = work(tmp_path, source, json_keys=["a", "b"], tokenizer_model=None, vocab_size=300)
    out = tmp_path / "out"
    tokenizer = load_tokenizer(out / "my_tokenizer")
    assert lines[0] == f"{out}/my_tokenizer: byte-level BPE, 300 tokens"
    assert lines[2].endswith("39 documents, " + lines[2].split("documents, ")[1])
    assert "; 1 empty text left out" in lines[2] and tokenizer.vocab_size == 300
    for key, expected in (("a", ["one two"] * 40), ("b", TEXTS[1:40])):
        found = documents(out / f"my_{key}_document")
        assert [tokenizer.detokenize(ids[:-1]) for ids in found] == expected
        assert {ids[-1] for ids in found} == {tokenizer.eod}
    small = write(tmp_path / "small.jsonl", {"text": "ab ab"})
    lines = work(tmp_path, small, tokenizer_model=None, vocab_size=10**6, name="small")
    assert "259 tokens, fewer than --vocab-size 1,000,000: the text" in lines[0]


BAD = [{"text": "fine"}, [1], {"text": "good"}, {"body": 1}, {"text": "last"}]


@pytest.mark.parametrize("trained", [True, False])
def test_bad_records_are_left_out_and_listed(tmp_path: Path, trained: bool) -> None:
    source = write(tmp_path / "in.jsonl", *BAD)
    model = {"tokenizer_model": None, "vocab_size": 300} if trained else {}
    with pytest.raises(InputError) as told:
        work(tmp_path, source, **model)
    assert str(told.value) == (
        f"--input {source} line 2: not a JSON object: expected one {{...}} per line; "
        "--max-bad N leaves up to N bad records out"
    )
    message = r"^more than --max-bad 1 bad records: --input \S+/in\.jsonl line 4: no key 'text'"
    with pytest.raises(InputError, match=message):
        work(tmp_path, source, max_bad=1, **model)
    assert not list(tmp_path.glob("out/*"))
    lines = work(tmp_path, source, max_bad=2, **model)
    assert lines[-2:] == [
        f"left out: --input {source} line 2: not a JSON object: expected one {{...}} per line",
        f"left out: --input {source} line 4: no key 'text' (its keys: 'body'): see --json-keys",
    ]
    bpe = load_tokenizer(tmp_path / ("out/my_tokenizer" if trained else "tokenizer"))
    found = documents(tmp_path / "out" / "my_text_document")
    assert [bpe.detokenize(ids[:-1]) for ids in found] == ["fine", "good", "last"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_bad": -1}, "--max-bad is -1: it must be at least 0"),
        ({"json_keys": ["a/b"]}, "--json-keys a/b: .* without a slash"),
        ({"input": ["/dev/null"], "tokenizer_model": None, "vocab_size": 300}, "be read twice"),
        ({"input": ["/dev/null"]}, "there is no text to write to my_text_document"),
        ({"tokenizer_model": None}, "or --vocab-size to train a new one"),
        ({"tokenizer_model": None, "vocab_size": 20}, "--vocab-size 20 is too small"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 3}, r"line 1 or a later one: .* 'fine'"),
    ],
)
def test_what_it_cannot_use_is_told(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    source = write(tmp_path / "in.jsonl", *BAD[:1])
    with pytest.raises(InputError, match=message):
        work(tmp_path, source, **changes)
    assert not list(tmp_path.glob("out/*"))


def test_what_is_there_is_not_overwritten_unasked(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"text": words(90, 1)})
    trained: dict[str, object] = {"tokenizer_model": None, "vocab_size": 300}
    work(tmp_path, source, **trained)
    write(source, {"text": words(90, 2)})
    out = tmp_path / "out"

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}

    before = files()
    with pytest.raises(InputError, match=r"my_text_document\.bin exists: .*--overwrite"):
        work(tmp_path, source, **trained)
    for suffix in ("bin", "idx"):
        (out / f"my_text_document.{suffix}").rename(tmp_path / f"kept.{suffix}")
    with pytest.raises(InputError, match=r"my_tokenizer exists: .*--overwrite"):
        work(tmp_path, source, **trained)
    for suffix in ("bin", "idx"):
        (tmp_path / f"kept.{suffix}").rename(out / f"my_text_document.{suffix}")
    assert files() == before
    work(tmp_path, source, overwrite=True, **trained)
    assert files().keys() == before.keys() and not list(tmp_path.glob(".*"))
    (ids,) = documents(out / "my_text_document")
    assert load_tokenizer(out / "my_tokenizer").detokenize(ids[:-1]) == words(90, 2)
