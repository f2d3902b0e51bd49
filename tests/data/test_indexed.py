"""Datasets, their manifests, and that the files are those of Megatron's own builder."""

import contextlib
import dataclasses
import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from moe_parallel.data.indexed import (
    IndexedWriter,
    Manifest,
    Size,
    SourceFile,
    check_indexed,
    check_new,
    id_type,
    manifest_path,
    move_indexed,
    read_manifest,
    tokenize_documents,
    write_indexed,
)
from moe_parallel.data.sealed import file_digest, write_sealed
from moe_parallel.errors import InputError
from tests.data.small_text import small_bpe, words

DOCUMENTS = [[5, 1, 2], [9], [3, 3, 3, 0]]


@pytest.mark.parametrize("vocab_size, itemsize", [(10, 2), (65_499, 2), (65_500, 4)])
def test_megatron_reads_what_was_written(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    prefix = tmp_path / "a.b" / "data"
    written = write_indexed(prefix, [*DOCUMENTS, []], vocab_size)
    assert written == Size(documents=3, tokens=8)
    dataset = IndexedDataset(str(prefix))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert os.path.getsize(f"{prefix}.bin") == 8 * itemsize
    assert check_indexed(str(prefix), vocab_size).tolist() == [3, 1, 4]
    assert sorted(p.suffix for p in prefix.parent.iterdir()) == [
        ".bin", ".idx", ".json", ".json"
    ]  # fmt: skip


def test_documents_end_where_they_should() -> None:
    bpe = small_bpe()
    texts = [words(5, seed) for seed in range(7)]
    documents = list(tokenize_documents(iter(texts), bpe, batch=3))
    assert [bpe.detokenize(ids[:-1]) for ids in documents] == texts
    assert {ids[-1] for ids in documents} == {bpe.eod}
    assert list(tokenize_documents(texts, bpe, append_eod=False)) == [d[:-1] for d in documents]


def test_a_writer_that_fails_leaves_the_old_pair(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    write_indexed(prefix, DOCUMENTS, 10)

    def failing() -> Iterator[list[int]]:
        yield [1, 2]
        raise RuntimeError("the input ended badly")

    with pytest.raises(RuntimeError, match="ended badly"):
        write_indexed(prefix, failing(), 10)
    assert check_indexed(str(prefix), 10).tolist() == [3, 1, 4]
    assert not list(tmp_path.glob("*.writing-*"))


def test_nothing_to_write_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no text to write"):
        write_indexed(tmp_path / "data", [[]], 10)
    assert list(tmp_path.iterdir()) == []


def replace(path: Path, content: bytes) -> None:
    """Another file with the same name and the same time, as `cp -p` or rsync writes it."""
    state = path.stat()
    temporary = path.with_name("other")
    temporary.write_bytes(content)
    os.utime(temporary, ns=(state.st_atime_ns, state.st_mtime_ns))
    os.replace(temporary, path)


def forget(prefix: str) -> None:
    """Make the dataset one that Megatron might have written."""
    Path(f"{prefix}.manifest.json").unlink()


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".idx", lambda b: b[:-1], r"\.idx is 101 bytes long where its header describes 102"),
        (".idx", lambda b: b + b"123456", r"\.idx is 108 bytes long"),
        (".idx", lambda b: b[:20], r"\.idx is truncated at 20 bytes"),
        (".idx", lambda b: b"", r"\.idx is truncated at 0 bytes"),
        (".idx", lambda b: b"PK" + b[2:], r"\.idx is not an index of Megatron's"),
        (".idx", lambda b: b[:17] + b"\x63" + b[18:], r"unknown type of token \(code 99\)"),
        (".idx", lambda b: b[:17] + b"\x07" + b[18:], r"float32"),
        (".idx", lambda b: b[:34] + struct.pack("<i", 4) + b[38:], r"offsets contradict"),
        (".bin", lambda b: b[:-2], r"\.bin has 14 bytes but its index describes 16"),
        (".bin", lambda b: b + b"\0", r"\.bin has 17 bytes but its index describes 16"),
    ],
)
def test_a_damaged_file_is_told(
    tmp_path: Path, suffix: str, change: Callable[[bytes], bytes], message: str
) -> None:
    prefix = tmp_path / "data"
    write_indexed(prefix, DOCUMENTS, 10)
    edit(Path(f"{prefix}{suffix}"), change)
    with pytest.raises(InputError, match=message) as caught:
        check_indexed(str(prefix), 10)
    assert "--data-path" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_missing_file_is_told(tmp_path: Path, suffix: str) -> None:
    prefix = tmp_path / "data"
    write_indexed(prefix, DOCUMENTS, 10)
    Path(f"{prefix}{suffix}").unlink()
    with pytest.raises(InputError, match=rf"data{suffix} is missing"):
        check_indexed(str(prefix), 10)


def test_a_file_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "data"
    write_indexed(prefix, DOCUMENTS, 10)
    Path(f"{prefix}.manifest.json").unlink()

    def closed(path: str, *_: object) -> None:  # root can read a file without permissions
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("builtins.open", closed)
    with pytest.raises(InputError, match=r"data\.idx cannot be read \(Permission denied\)"):
        check_indexed(str(prefix), 10)


def test_the_prefix_that_was_probably_meant_is_named(tmp_path: Path) -> None:
    write_indexed(tmp_path / "my_text_document", DOCUMENTS, 10)
    for given in ("my", "my_text_document.bin"):
        with pytest.raises(InputError, match=r"did you mean \S*my_text_document\?"):
            check_indexed(str(tmp_path / given), 10)


def test_token_ids_beyond_the_vocabulary_are_told(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    write_indexed(Path(prefix), DOCUMENTS, 10)
    for _ in range(2):  # the second time from the note next to the file
        with pytest.raises(InputError, match=r"document 1 holds token id 9, outside .* of 9;"):
            check_indexed(prefix, 9)
    # The same number of bytes, but a later time: the note is not valid.
    forget(prefix)
    replace(Path(f"{prefix}.bin"), np.array([1, 1, 1, 1, 8, 1, 1, 1], dtype=np.uint16).tobytes())
    assert len(check_indexed(prefix, 9)) == 3
    with pytest.raises(InputError, match=r"document 2 holds token id 8"):
        check_indexed(prefix, 8)


def test_negative_token_ids_are_told(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    write_indexed(Path(prefix), DOCUMENTS, 70_000)
    forget(prefix)
    np.array([1, 1, 1, 1, 1, 1, 1, -1], dtype=np.int32).tofile(f"{prefix}.bin")
    with pytest.raises(InputError, match=r"document 2 holds token id -1"):
        check_indexed(prefix, 70_000)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_file_that_is_not_the_manifests_is_told(tmp_path: Path, suffix: str) -> None:
    prefix, other = str(tmp_path / "data"), str(tmp_path / "other")
    write_indexed(Path(prefix), DOCUMENTS, 10)
    write_indexed(Path(other), [[5, 1, 2, 9], [3, 3, 3, 1]], 10)  # the same number of tokens
    assert len(check_indexed(prefix, 10)) == 3
    for path in (".bin", ".idx") if suffix == ".idx" else (".bin",):
        replace(Path(prefix + path), Path(other + path).read_bytes())
    with pytest.raises(
        InputError, match=rf"data\{suffix} is not the file that data\.manifest\.json"
    ):
        check_indexed(prefix, 10)
    forget(prefix)
    assert len(check_indexed(prefix, 10)) in (2, 3)


def test_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = tmp_path / "data"
    write_indexed(prefix, DOCUMENTS, 10)
    for _ in range(2):
        check_indexed(str(prefix), 10)
        monkeypatch.setattr("moe_parallel.data.indexed.hashlib", None)
    with pytest.raises(InputError, match="outside the vocabulary of 9"):
        check_indexed(str(prefix), 9)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_dataset_that_exists_is_not_overwritten_unasked(tmp_path: Path, overwrite: bool) -> None:
    check_new(tmp_path / "data", overwrite)
    write_indexed(tmp_path / "data", DOCUMENTS, 10)
    with contextlib.nullcontext() if overwrite else pytest.raises(InputError, match="--overwrite"):
        check_new(tmp_path / "data", overwrite)


def test_a_dataset_moves_with_its_manifest(tmp_path: Path) -> None:
    write_indexed(tmp_path / "from", DOCUMENTS, 10, tokenizer="some", seq_length=5)
    write_indexed(tmp_path / "to", [[1]], 10)
    manifest = read_manifest(tmp_path / "from")
    move_indexed(tmp_path / "from", tmp_path / "to")
    assert read_manifest(tmp_path / "to") == manifest
    assert check_indexed(str(tmp_path / "to"), 10).tolist() == [3, 1, 4]
    assert not list(tmp_path.glob("from*"))


def test_a_damaged_note_is_scanned_over(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    write_indexed(Path(prefix), DOCUMENTS, 10)
    Path(f"{prefix}.range.json").write_text("[]")
    assert len(check_indexed(prefix, 10)) == 3


def test_a_manifest_of_other_numbers_is_told(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    write_indexed(prefix, DOCUMENTS, 10)
    manifest = read_manifest(prefix)
    assert manifest is not None
    facts = {"format": 2, **dataclasses.asdict(manifest)}
    write_sealed(manifest_path(prefix), facts | {"documents": 4})
    with pytest.raises(InputError, match=r"data\.manifest\.json says 4 documents and .* has 3;"):
        check_indexed(str(prefix), 10)
    write_sealed(manifest_path(prefix), facts | {"tokens": 1_000})
    with pytest.raises(InputError, match=r"says 1,000 tokens and the index has 8; write the"):
        check_indexed(str(prefix), 10)


@pytest.mark.parametrize("vocab_size", [2, 65_499, 65_500, 200_000])
def test_megatron_writes_the_same_bytes(tmp_path: Path, vocab_size: int) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, vocab_size, n).tolist() for n in (3, 1, 50, 7, 2, 2, 1, 19)]
    builder = IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size)
    )
    for ids in documents:
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    write_indexed(tmp_path / "ours", documents, vocab_size)
    for suffix in ("bin", "idx"):
        theirs = (tmp_path / f"theirs.{suffix}").read_bytes()
        assert (tmp_path / f"ours.{suffix}").read_bytes() == theirs


def test_several_documents_are_added_at_once(tmp_path: Path) -> None:
    sources = [SourceFile("a.jsonl", 3, "abc")]
    with IndexedWriter(tmp_path / "some", 9) as writer:
        for lengths, ids in (([2, 1], [1, 2, 3]), ([], []), ([4], [4, 5, 6, 7])):
            writer.add(np.array(lengths, np.int32), np.array(ids, np.uint16))
        writer.finish(tokenizer="t", seq_length=5, sources=sources, domains={"a": Size(3, 7)})
    manifest = read_manifest(tmp_path / "some")
    assert manifest is not None
    write_indexed(
        tmp_path / "one", [[1, 2], [3], [4, 5, 6, 7]], 9,
        tokenizer="t", seq_length=5, sources=sources,
    )  # fmt: skip
    for suffix in ("bin", "idx"):
        one = (tmp_path / f"one.{suffix}").read_bytes()
        assert (tmp_path / f"some.{suffix}").read_bytes() == one
    assert check_indexed(str(tmp_path / "some"), 9).tolist() == [2, 1, 4]
    assert (manifest.sources, manifest.domains) == (tuple(sources), {"a": Size(3, 7)})


def test_without_documents_there_is_no_index(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no text to write to data: the input is empty"):
        with IndexedWriter(tmp_path / "data", 9) as writer:
            writer.add(np.array([], np.int32), np.array([], np.uint16))
            writer.finish()
    assert not (tmp_path / "data.idx").exists()


def test_ids_have_the_type_of_the_vocabulary() -> None:
    for size in (2, 65_499, 65_500, 2**31):
        assert id_type(size) == np.dtype(DType.optimal_dtype(size))


def test_a_dataset_says_what_it_holds(tmp_path: Path) -> None:
    prefix = tmp_path / "a.b"
    write_indexed(prefix, [[1, 2, 3], [4], []], 10, tokenizer="abc", seq_length=3)
    assert read_manifest(prefix) == Manifest(
        documents=2,
        tokens=4,
        bin_sha256=file_digest(Path(f"{prefix}.bin")),
        idx_sha256=file_digest(Path(f"{prefix}.idx")),
        tokenizer="abc",
        seq_length=3,
    )


def test_what_megatron_wrote_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path / "data") is None


OLD: dict[str, Any] = {
    "documents": 3, "tokens": 7, "bin_sha256": "", "idx_sha256": "", "tokenizer": None,
    "seq_length": None,
}  # fmt: skip
SOURCE = {"path": "a.jsonl", "bytes": 9, "sha256": "abc"}
DOMAINS = {"a": {"documents": 1, "tokens": 4}, "b": {"documents": 2, "tokens": 3}}
FACTS: dict[str, Any] = {**OLD, "sources": [SOURCE], "domains": DOMAINS}
MANIFEST = Manifest(
    **OLD,
    sources=(SourceFile("a.jsonl", 9, "abc"),),
    domains={"a": Size(1, 4), "b": Size(2, 3)},
)


@pytest.mark.parametrize(
    "content",
    [
        {"format": 3, **FACTS},
        {**FACTS},
        {"format": 1, **FACTS},
        {"format": 1, **OLD, "tokens": "many"},
        {"format": 1, **OLD, "more": 1},
        {"format": 1},
        {"format": 2, **OLD},
        {"format": 2, **FACTS, "more": 1},
        {"format": 2, **FACTS, "tokens": 8},
        {"format": 2, **FACTS, "domains": {}},
        {"format": 2, **FACTS, "domains": [["a", 3, 7]]},
        {"format": 2, **FACTS, "domains": {"a": {"documents": 3}}},
        {"format": 2, **FACTS, "domains": {"a": {"documents": 3, "tokens": "7"}}},
        {"format": 2, **FACTS, "sources": 1},
        {"format": 2, **FACTS, "sources": ["a.jsonl"]},
        {"format": 2, **FACTS, "sources": [{**SOURCE, "bytes": None}]},
        {"format": 2, **FACTS, "sources": [{**SOURCE, "more": 1}]},
    ],
)
def test_a_manifest_of_another_form_is_told(tmp_path: Path, content: dict[str, Any]) -> None:
    write_sealed(manifest_path(tmp_path / "data"), content)
    message = r"data\.manifest\.json is not of format [12].*; restore it, or delete it"
    with pytest.raises(InputError, match=message) as told:
        read_manifest(tmp_path / "data")
    assert "\n" not in str(told.value)


def test_it_is_read(tmp_path: Path) -> None:
    write_sealed(manifest_path(tmp_path / "hand"), {"format": 2, **FACTS})
    assert read_manifest(tmp_path / "hand") == MANIFEST


def test_one_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    write_sealed(manifest_path(tmp_path / "data"), {"format": 1, **OLD})
    assert read_manifest(tmp_path / "data") == Manifest(**OLD, sources=None, domains=None)


@pytest.mark.parametrize("change", ["[" * 100_000, "{}", "", "\ufffd", '{"checksum": 1}'])
def test_a_damaged_manifest_is_told(tmp_path: Path, change: str) -> None:
    manifest_path(tmp_path / "data").write_text(change)
    with pytest.raises(InputError, match=r"data\.manifest\.json is damaged .*delete it") as caught:
        read_manifest(tmp_path / "data")
    assert "\n" not in str(caught.value)
