"""Datasets, their manifests, and that the files are those of Megatron's own builder."""

import contextlib
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
    check_indexed,
    check_new,
    id_type,
    manifest_path,
    move_indexed,
    read_manifest,
    write_indexed,
)
from moe_parallel.data.sealed import file_digest, write_sealed
from moe_parallel.errors import InputError

DOCUMENTS = [[5, 1, 2], [9], [3, 3, 3, 0]]


@pytest.fixture
def data(tmp_path: Path) -> str:
    """The prefix of a dataset of the three documents."""
    write_indexed(tmp_path / "data", DOCUMENTS, 10)
    return str(tmp_path / "data")


@pytest.mark.parametrize("vocab_size", [2, 65_499, 65_500, 200_000])
def test_the_files_are_those_of_megatron(tmp_path: Path, vocab_size: int) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, vocab_size, n).tolist() for n in (3, 1, 50, 7, 2, 2, 1, 19)]
    builder = IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size)
    )
    for ids in documents:
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    prefix = tmp_path / "a.b" / "ours"
    assert write_indexed(prefix, [*documents, []], vocab_size) == (8, 85)
    with IndexedWriter(tmp_path / "some", vocab_size) as writer:  # several at once
        for part in (documents[:3], [], documents[3:]):
            ids = np.array(sum(part, []), id_type(vocab_size))
            writer.add(np.array([len(each) for each in part], np.int32), ids)
        writer.finish()
    for suffix in ("bin", "idx"):
        theirs = (tmp_path / f"theirs.{suffix}").read_bytes()
        assert Path(f"{prefix}.{suffix}").read_bytes() == theirs
        assert (tmp_path / f"some.{suffix}").read_bytes() == theirs
    dataset = IndexedDataset(str(prefix))
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents
    assert check_indexed(str(prefix), vocab_size).tolist() == [len(each) for each in documents]
    names = ["ours.bin", "ours.idx", "ours.manifest.json", "ours.range.json"]
    assert sorted(path.name for path in prefix.parent.iterdir()) == names


def test_a_writer_that_fails_leaves_the_old_pair(data: str) -> None:
    def failing() -> Iterator[list[int]]:
        yield [1, 2]
        raise RuntimeError("the input ended badly")

    with pytest.raises(RuntimeError, match="ended badly"):
        write_indexed(Path(data), failing(), 10)
    with pytest.raises(InputError, match="no text to write to data: the input is empty"):
        write_indexed(Path(data), [[]], 10)
    assert check_indexed(data, 10).tolist() == [3, 1, 4]
    assert not list(Path(data).parent.glob("*.writing-*"))


def replace(path: Path, content: bytes) -> None:
    """Another file with the same name and the same time, as `cp -p` or rsync writes it."""
    state = path.stat()
    temporary = path.with_name("other-file")
    temporary.write_bytes(content)
    os.utime(temporary, ns=(state.st_atime_ns, state.st_mtime_ns))
    os.replace(temporary, path)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".idx", lambda b: b[:-1], r"\.idx is 101 bytes long where its header describes 102"),
        (".idx", lambda b: b[:20], r"\.idx is truncated at 20 bytes"),
        (".idx", lambda b: b"PK" + b[2:], r"\.idx is not an index of Megatron's"),
        (".idx", lambda b: b[:17] + b"\x63" + b[18:], r"unknown type of token \(code 99\)"),
        (".idx", lambda b: b[:34] + struct.pack("<i", 4) + b[38:], r"offsets contradict"),
        (".bin", lambda b: b[:-2], r"\.bin has 14 bytes but its index describes 16"),
    ],
)
def test_a_damaged_file_is_told(
    data: str, suffix: str, change: Callable[[bytes], bytes], message: str
) -> None:
    path = Path(f"{data}{suffix}")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=message) as caught:
        check_indexed(data, 10)
    assert "--data-path" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_missing_or_closed_file_is_told(
    data: str, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    Path(f"{data}{suffix}").rename(f"{data}.kept")
    with pytest.raises(InputError, match=rf"data{suffix} is missing"):
        check_indexed(data, 10)
    Path(f"{data}.kept").rename(f"{data}{suffix}")
    manifest_path(data).unlink()

    def closed(path: str, *_: object) -> None:  # root can read a file without permissions
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("builtins.open", closed)
    with pytest.raises(InputError, match=r"data\.idx cannot be read \(Permission denied\)"):
        check_indexed(data, 10)


def test_the_prefix_that_was_probably_meant_is_named(tmp_path: Path) -> None:
    write_indexed(tmp_path / "my_text_document", DOCUMENTS, 10)
    for given in ("my", "my_text_document.bin"):
        with pytest.raises(InputError, match=r"did you mean \S*my_text_document\?"):
            check_indexed(str(tmp_path / given), 10)


def test_token_ids_outside_the_vocabulary_are_told(tmp_path: Path, data: str) -> None:
    for _ in range(2):  # the second time from the note next to the file
        with pytest.raises(InputError, match=r"document 1 holds token id 9, outside .* of 9;"):
            check_indexed(data, 9)
    # The same number of bytes, but a later time: the note is not valid.
    manifest_path(data).unlink()
    replace(Path(f"{data}.bin"), np.array([1, 1, 1, 1, 8, 1, 1, 1], dtype=np.uint16).tobytes())
    assert len(check_indexed(data, 9)) == 3
    with pytest.raises(InputError, match=r"document 2 holds token id 8"):
        check_indexed(data, 8)
    Path(f"{data}.range.json").write_text("[]")
    with pytest.raises(InputError, match=r"document 2 holds token id 8"):
        check_indexed(data, 8)
    large = str(tmp_path / "large")
    write_indexed(Path(large), DOCUMENTS, 70_000)
    manifest_path(large).unlink()
    np.array([1, 1, 1, 1, 1, 1, 1, -1], dtype=np.int32).tofile(f"{large}.bin")
    with pytest.raises(InputError, match=r"document 2 holds token id -1"):
        check_indexed(large, 70_000)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_file_that_is_not_the_manifests_is_told(tmp_path: Path, data: str, suffix: str) -> None:
    other = str(tmp_path / "other")
    write_indexed(Path(other), [[5, 1, 2, 9], [3, 3, 3, 1]], 10)  # the same number of tokens
    assert len(check_indexed(data, 10)) == 3
    for path in (".bin", ".idx") if suffix == ".idx" else (".bin",):
        replace(Path(data + path), Path(other + path).read_bytes())
    with pytest.raises(
        InputError, match=rf"data\{suffix} is not the file that data\.manifest\.json"
    ):
        check_indexed(data, 10)
    manifest_path(data).unlink()
    assert len(check_indexed(data, 10)) in (2, 3)


def test_a_large_file_is_read_once(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        check_indexed(data, 10)
        monkeypatch.setattr("moe_parallel.data.indexed.hashlib", None)
    with pytest.raises(InputError, match="outside the vocabulary of 9"):
        check_indexed(data, 9)


def test_a_dataset_moves_with_its_manifest(tmp_path: Path) -> None:
    write_indexed(tmp_path / "from", DOCUMENTS, 10, tokenizer="some", sources=("a", "b"))
    write_indexed(tmp_path / "to", [[1]], 10)
    for overwrite in (False, True):
        with contextlib.nullcontext() if overwrite else pytest.raises(InputError, match="--over"):
            check_new(tmp_path / "to", overwrite)
    bin_digest, idx_digest = (file_digest(tmp_path / f"from.{suffix}") for suffix in ("bin", "idx"))
    move_indexed(tmp_path / "from", tmp_path / "to")
    found = read_manifest(tmp_path / "to")
    assert found == Manifest(3, 8, bin_digest, idx_digest, "some", None, ("a", "b"))
    assert check_indexed(str(tmp_path / "to"), 10).tolist() == [3, 1, 4]
    assert not list(tmp_path.glob("from*")) and read_manifest(tmp_path / "from") is None
    check_new(tmp_path / "from", False)


FACTS: dict[str, Any] = {
    "documents": 3, "tokens": 8, "bin_sha256": "", "idx_sha256": "", "tokenizer": None,
    "seq_length": None,
}  # fmt: skip
DOMAINS = {"a": {"documents": 3, "tokens": 8}}


@pytest.mark.parametrize(
    ("more", "sources"),
    [
        ({"format": 1}, None),
        ({"format": 2, "sources": [{"path": "a", "bytes": 1}], "domains": DOMAINS}, ("a",)),
        ({"format": 3, "sources": ["a"]}, ("a",)),
        ({"format": 4, "sources": ["a"]}, False),
        ({"format": 2, "sources": [5], "domains": None}, False),
        ({"format": 3, "tokens": "many"}, False),
        ({"format": 3, "more": 1}, False),
    ],
)
def test_manifests_of_each_format(
    tmp_path: Path, more: dict[str, Any], sources: tuple[str, ...] | None | bool
) -> None:
    write_sealed(manifest_path(tmp_path / "data"), FACTS | more)
    if sources is False:
        message = r"data\.manifest\.json is not of format 3.*; restore it, or delete it"
        with pytest.raises(InputError, match=message) as told:
            read_manifest(tmp_path / "data")
        assert "\n" not in str(told.value)
    else:
        assert read_manifest(tmp_path / "data") == Manifest(**FACTS, sources=sources)


@pytest.mark.parametrize("change", ["[" * 100_000, "{}", "", '{"checksum": 1}'])
def test_a_damaged_manifest_is_told(data: str, change: str) -> None:
    manifest_path(data).write_text(change)
    with pytest.raises(InputError, match=r"is damaged .*delete it") as caught:
        check_indexed(data, 10)
    assert "\n" not in str(caught.value)
