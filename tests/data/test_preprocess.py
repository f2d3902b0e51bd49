"""Whole runs in this process; the flags of the tool are in tests/tools."""

import bz2
import errno
import gzip
import json
import lzma
import multiprocessing
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pytest
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset
from pyarrow import parquet

from moe_parallel.data import text_files
from moe_parallel.data.indexed import Manifest, Size, read_manifest
from moe_parallel.data.preprocess import preprocess
from moe_parallel.data.sealed import file_digest
from moe_parallel.errors import InputError
from tests.data.small_text import small_bpe, words


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


TEXTS = [words(i % 50, i) for i in range(300)]
RECORDS = [{"text": text, "kind": "ab"[i % 3 > 0], "id": i} for i, text in enumerate(TEXTS)]


@contextmanager
def no_progress(label: str, total: int | None) -> Iterator[Callable[[int], object]]:
    yield lambda count: None


def work(folder: Path, *inputs: Path, name: str = "out", **changes: object) -> Namespace:
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
        "domain_key": None,
    }
    return Namespace(**{**fields, **changes})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def manifest_of(prefix: Path) -> Manifest:
    manifest = read_manifest(prefix)
    assert manifest is not None
    return manifest


@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.full)])
def test_the_number_of_workers_does_not_change_a_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(text_files, "_BATCH", 1000)  # tens of batches
    source = write(tmp_path / "in.jsonl", *RECORDS[:100], [], *RECORDS[100:], {"text": 7})
    for workers in (1, most):
        run = work(tmp_path, source, name=f"out{workers}", workers=workers, max_bad=2)
        preprocess(run, no_progress)
    one = files(tmp_path / "out1")
    assert sorted(one) == [
        "my_bad.jsonl",
        "my_text_document.bin",
        "my_text_document.idx",
        "my_text_document.manifest.json",
    ]
    assert files(tmp_path / f"out{most}") == one
    bpe = small_bpe()
    kept = [text for text in TEXTS if text]
    assert documents(tmp_path / "out1" / "my_text_document") == [
        [*bpe.tokenize(text), bpe.eod] for text in kept
    ]


def as_parquet(path: Path, records: list[dict[str, object]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=70)
    return path


def as_files(folder: Path) -> Path:
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.txt").write_bytes(text.encode())
    return folder


def packed(path: Path, pack: Callable[[bytes], bytes], source: Path) -> Path:
    path.write_bytes(pack(source.read_bytes()))
    return path


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.jsonl", *RECORDS)
    halves = tmp_path / "halves"
    halves.mkdir()
    first = write(tmp_path / "first.jsonl", *RECORDS[:150])
    packed(halves / "1.jsonl.gz", gzip.compress, first)
    as_parquet(halves / "2.parquet", RECORDS[150:])
    inputs = {
        "plain": plain,
        "gz": packed(tmp_path / "in.jsonl.gz", gzip.compress, plain),
        "bz2": packed(tmp_path / "in.jsonl.bz2", bz2.compress, plain),
        "xz": packed(tmp_path / "in.jsonl.xz", lzma.compress, plain),
        "text": as_files(tmp_path / "texts"),
        "zst": packed(tmp_path / "in.jsonl.zst", zstandard.ZstdCompressor().compress, plain),
        "parquet": as_parquet(tmp_path / "in.parquet", RECORDS),
        "folder": halves,
        "glob": halves / "*",
    }
    found = {}
    for name, path in inputs.items():
        preprocess(work(tmp_path, path, name=name), no_progress)
        prefix = tmp_path / name / "my_text_document"
        found[name] = [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")]
        manifest = manifest_of(prefix)
        folder = path if path.is_dir() else halves
        sources = [path] if path.is_file() else sorted(folder.iterdir())
        assert manifest.sources is not None
        assert [(source.path, source.bytes, source.sha256) for source in manifest.sources] == [
            (str(each), each.stat().st_size, file_digest(each)) for each in sources
        ]
    assert all(each == found["plain"] for each in found.values())


def test_domains_add_up_to_the_dataset(tmp_path: Path) -> None:
    for name, part in (("a", RECORDS[:100]), ("b", RECORDS[100:])):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "in.jsonl", *part)
    bpe = small_bpe()
    sizes = [len(bpe.tokenize(text)) for text in TEXTS]

    def expected(*names: str) -> dict[str, Size]:
        """By the name of each record's domain."""
        kept = {name: [s for s, n in zip(sizes, names, strict=True) if s and n == name]
                for name in sorted(set(names))}  # fmt: skip
        return {name: Size(len(of), sum(of)) for name, of in kept.items()}

    inputs = (tmp_path / "a", tmp_path / "b")
    preprocess(work(tmp_path, *inputs, name="by_folder", append_eod=False), no_progress)
    by_folder = manifest_of(tmp_path / "by_folder" / "my_text_document")
    assert by_folder.domains == expected(*["a"] * 100, *["b"] * 200)
    run = work(tmp_path, *inputs, name="by_key", append_eod=False, domain_key="kind")
    preprocess(run, no_progress)
    by_key = manifest_of(tmp_path / "by_key" / "my_text_document")
    assert by_key.domains == expected(*["ab"[i % 3 > 0] for i in range(300)])
    assert by_key.tokens == sum(sizes)
    run = work(tmp_path, *inputs, name="too_many", domain_key="text")
    write(tmp_path / "a" / "in.jsonl", *({"text": str(i)} for i in range(1001)))
    with pytest.raises(InputError, match="more than 1,000 domains: give --domain-key"):
        preprocess(run, no_progress)
    assert list((tmp_path / "too_many").iterdir()) == []


def test_empty_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "a", "title": ""}, {"text": "b", "title": "c"})
    lines = preprocess(work(tmp_path, source, json_keys=["text", "title"]), no_progress)
    assert lines == [
        f"{tmp_path}/out/my_text_document: 2 documents, 4 tokens",
        f"{tmp_path}/out/my_title_document: 1 document, 2 tokens; 1 empty text left out",
    ]


BAD = [{"text": "fine"}, [1], {"text": "good"}, {"body": 1}, {"text": "last"}]


def test_bad_records_are_left_out_and_listed(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *BAD)
    rows = as_parquet(tmp_path / "in.parquet", [{"text": "row"}, {"text": None}])
    lines = preprocess(work(tmp_path, source, rows, max_bad=3), no_progress)
    bad = tmp_path / "out" / "my_bad.jsonl"
    assert lines[-1] == f"{bad}: 3 bad records, left out"
    assert [json.loads(line) for line in bad.read_text().splitlines()] == [
        {"file": str(source), "line": 2,
         "reason": "not a JSON object: expected one {...} per line"},
        {"file": str(source), "line": 4,
         "reason": "no key 'text' (its keys: 'body'): see --json-keys"},
        {"file": str(rows), "row": 2, "reason": "no text under 'text' (null)"},
    ]  # fmt: skip
    bpe = small_bpe()
    found = documents(tmp_path / "out" / "my_text_document")
    assert [bpe.detokenize(ids[:-1]) for ids in found] == ["fine", "good", "last", "row"]
    write(source, BAD[0])
    with pytest.raises(InputError, match="my_text_document.bin exists"):
        preprocess(work(tmp_path, source), no_progress)
    preprocess(work(tmp_path, source, overwrite=True), no_progress)
    assert not bad.exists()


def test_a_file_that_is_not_utf_8_has_two_ways_out(tmp_path: Path) -> None:
    texts = as_files(tmp_path / "texts")
    latin = texts / "150.txt"
    latin.write_bytes("façade".encode("latin-1"))
    with pytest.raises(InputError) as told:
        preprocess(work(tmp_path, texts), no_progress)
    assert str(told.value) == (
        f"--input {latin} document 1: not UTF-8 (byte 3): convert it, as iconv -f latin1 -t utf-8 "
        "does; --max-bad N leaves up to N bad records out"
    )
    lines = preprocess(work(tmp_path, texts, max_bad=1), no_progress)
    assert lines[-1] == f"{tmp_path}/out/my_bad.jsonl: 1 bad record, left out"
    latin.write_bytes(latin.read_bytes().decode("latin-1").encode())
    (line,) = preprocess(work(tmp_path, texts, overwrite=True), no_progress)
    assert f"{sum(map(bool, TEXTS)) + (not TEXTS[150])} documents" in line


def test_a_record_is_bad_if_one_of_its_texts_is(tmp_path: Path) -> None:
    texts = ["1 2", "3"], ["4", "x"], ["y", "5"], ["6", "7 8"]
    source = write(tmp_path / "in.jsonl", *({"a": a, "b": b} for a, b in texts))
    numbers = {"tokenizer_type": "NullTokenizer", "tokenizer_model": None, "vocab_size": 10}
    preprocess(work(tmp_path, source, json_keys=["a", "b"], max_bad=2, **numbers), no_progress)
    listed = (tmp_path / "out" / "my_bad.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in listed] == [2, 3]
    assert documents(tmp_path / "out" / "my_a_document") == [[1, 2, 9], [6, 9]]
    assert documents(tmp_path / "out" / "my_b_document") == [[3, 9], [7, 8, 9]]


@pytest.mark.parametrize("trained", [True, False])
def test_one_bad_record_too_many_ends_it(tmp_path: Path, trained: bool) -> None:
    source = write(tmp_path / "in.jsonl", *BAD)
    model = {"tokenizer_model": None, "vocab_size": 300} if trained else {}
    message = r"^more than --max-bad 1 bad records: --input \S+/in\.jsonl line 4: no key 'text'"
    with pytest.raises(InputError, match=message):
        preprocess(work(tmp_path, source, max_bad=1, **model), no_progress)
    with pytest.raises(InputError, match=r"^--input \S+/in\.jsonl line 2: not a JSON object"):
        preprocess(work(tmp_path, source, **model), no_progress)
    assert not list(tmp_path.glob("out/*"))
    preprocess(work(tmp_path, source, max_bad=2, **model), no_progress)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_bad": -1}, "--max-bad is -1: it must be at least 0"),
        ({"json_keys": ["text", "text"]}, "--json-keys text: name each key once"),
        ({"json_keys": ["a/b"]}, "--json-keys a/b: .* without a slash"),
        ({"input": ["/none"]}, "--input /none cannot be read"),
        ({"input": ["/dev/null"], "tokenizer_model": None, "vocab_size": 300}, "be read twice"),
        ({"input": ["/dev/null"]}, "there is no text to write to my_text_document"),
    ],
)
def test_an_unusable_flag_is_told(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    source = write(tmp_path / "in.jsonl", *BAD[:1])
    with pytest.raises(InputError, match=message):
        preprocess(work(tmp_path, source, **changes), no_progress)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_file_after_a_good_one_leaves_nothing(tmp_path: Path, workers: int) -> None:
    good = write(tmp_path / "1.jsonl", *RECORDS)
    torn = packed(tmp_path / "2.jsonl.gz", lambda data: gzip.compress(data)[:-9], good)
    with pytest.raises(InputError, match=rf"{torn} is truncated at"):
        preprocess(work(tmp_path, good, torn, workers=workers), no_progress)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("keys", [["text"], ["text", "kind"]])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    """It is full when the last file is flushed."""
    source = write(tmp_path / "in.jsonl", *RECORDS)
    run = work(tmp_path, source, json_keys=keys)

    def full(path: Path) -> None:
        if path.name == f"my_{keys[-1]}_document.idx":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("moe_parallel.data.indexed.flush_to_disk", full)
    message = r"out/my cannot be written \(No space left on device\): name a folder on a disk"
    with pytest.raises(InputError, match=message):
        preprocess(run, no_progress)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_worker_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_BATCH", 500)

    @contextmanager
    def killing(label: str, total: int | None) -> Iterator[Callable[[int], object]]:
        def kill(count: int) -> None:
            for child in multiprocessing.active_children():
                child.kill()

        yield kill

    source = write(tmp_path / "in.jsonl", *RECORDS)
    with pytest.raises(InputError, match="--workers 2: a worker was killed, perhaps for lack of"):
        preprocess(work(tmp_path, source, workers=2), killing)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_progress_is_that_of_the_bytes_on_the_disk(tmp_path: Path) -> None:
    told: dict[str, list[int]] = {}

    @contextmanager
    def telling(label: str, total: int | None) -> Iterator[Callable[[int], object]]:
        assert total is not None
        told[label] = [total, 0]

        def add(count: int) -> None:
            told[label][1] += count

        yield add

    source = write(tmp_path / "in.jsonl", *RECORDS)
    inputs = (packed(tmp_path / "in.gz", gzip.compress, source),
              as_parquet(tmp_path / "in.parquet", RECORDS), source)  # fmt: skip
    size = sum(path.stat().st_size for path in inputs)
    preprocess(work(tmp_path, *inputs, tokenizer_model=None, vocab_size=300), telling)
    assert told == {"training the tokenizer": [size, size], "tokenizing": [size, size]}
