import contextlib
import dataclasses
import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from moe_parallel.data.indexed import (
    WrittenDataset,
    check_indexed,
    check_new,
    move_indexed,
    tokenize_documents,
    write_indexed,
)
from moe_parallel.data.manifest import read_manifest, write_manifest
from moe_parallel.errors import InputError
from tests.data.small_text import small_bpe, words

DOCUMENTS = [[5, 1, 2], [9], [3, 3, 3, 0]]


@pytest.mark.parametrize("vocab_size, itemsize", [(10, 2), (65_499, 2), (65_500, 4)])
def test_megatron_reads_what_was_written(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    prefix = tmp_path / "a.b" / "data"
    written = write_indexed(prefix, [*DOCUMENTS, []], vocab_size)
    assert written == WrittenDataset(documents=3, tokens=8)
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
        monkeypatch.setattr("moe_parallel.data.indexed._scan", None)
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
    write_manifest(prefix, dataclasses.replace(manifest, documents=4))
    with pytest.raises(InputError, match=r"data\.manifest\.json says 4 documents and .* has 3;"):
        check_indexed(str(prefix), 10)
    write_manifest(prefix, dataclasses.replace(manifest, tokens=1_000))
    with pytest.raises(InputError, match=r"says 1,000 tokens and the index has 8; write the"):
        check_indexed(str(prefix), 10)
