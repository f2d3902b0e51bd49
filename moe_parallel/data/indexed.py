"""Megatron indexed datasets: `PREFIX.bin` has token ids, `PREFIX.idx` the place of each document.

indexed_writer.py writes them and Megatron-Core's own classes read them. Three things are added to
Megatron's format: a pair of files is published completely or not at all, it has a manifest, and the
error for a bad file is one line.

The manifest (manifest.py) has checksums of both files. The index, which training reads completely
anyway, is compared each time. PREFIX.bin may be terabytes: it is compared once, and again when the
file system reports that it has changed or is a copy (`st_ctime`, which only a write, a rename and
the like can set). `PREFIX.range.json` contains the result; without it, the file is read again.

Layout of an index (little-endian): b"MMIDIDX\\0\\0", version u64 = 1, type code u8, number of
sequences u64, number of documents u64 (one more than there are), lengths i32, byte offsets i64,
document boundaries i64, and for multimodal data a mode i8 a sequence.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType

from moe_parallel.data.indexed_writer import (
    INDEX_HEADER,
    MAGIC,
    WrittenDataset,
    check_new,
    move_indexed,
    write_indexed,
)
from moe_parallel.data.manifest import Manifest, manifest_path, read_manifest
from moe_parallel.data.sealed import file_digest, read_sealed, write_sealed
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError

__all__ = [
    "WrittenDataset",
    "check_indexed",
    "check_new",
    "move_indexed",
    "tokenize_documents",
    "type_of_ids",
    "write_indexed",
]

# Tokens read at a time when a .bin file is scanned: 32 to 64 MiB of memory.
_CHUNK = 16 * 2**20


def tokenize_documents(
    texts: Iterable[str], tokenizer: Tokenizer, append_eod: bool = True, batch: int = 256
) -> Iterator[list[int]]:
    """Token ids of each text, followed by the end of document; `batch` texts at a time."""
    ending = [tokenizer.eod] if append_eod else []
    waiting: list[str] = []
    for text in texts:
        waiting.append(text)
        if len(waiting) == batch:
            yield from (ids + ending for ids in tokenizer.tokenize_all(waiting))
            waiting = []
    yield from (ids + ending for ids in tokenizer.tokenize_all(waiting))


def check_indexed(prefix: str, vocab_size: int) -> np.ndarray:
    """Check that PREFIX.bin and PREFIX.idx are complete and fit each other and the vocabulary.

    Both are compared with PREFIX.manifest.json if it exists, as described at the top of this file.
    The result of a scan of PREFIX.bin is stored in PREFIX.range.json if that can be written, so
    that a large file is scanned once.

    Returns:
        int32 [number of sequences]: tokens per sequence.

    Raises:
        InputError: a missing, unreadable, truncated or foreign file; sizes that disagree;
            foreign token ids; files that are not those of the manifest.
    """
    manifest = read_manifest(prefix)
    for suffix in (".idx", ".bin"):
        if not os.path.isfile(prefix + suffix):
            raise InputError(f"--data-path {prefix}: {prefix}{suffix} is missing; {_hint(prefix)}")
        try:
            open(prefix + suffix, "rb").close()
        except OSError as error:
            raise InputError(
                f"--data-path {prefix}: {prefix}{suffix} cannot be read ({error.strerror}); "
                "check its permissions"
            ) from None
    dtype, lengths = _read_index(prefix)
    size = os.path.getsize(f"{prefix}.bin")
    expected = int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    if size != expected:
        raise InputError(
            f"--data-path {prefix}: {prefix}.bin has {size:,} bytes but its index describes "
            f"{expected:,}; the file is truncated or belongs to another index; write both files "
            "again"
        )
    if size == 0:
        raise InputError(
            f"--data-path {prefix}: there is no token in {prefix}.bin: name a dataset with text"
        )
    if manifest is not None:
        _check_index(prefix, lengths, manifest)
    found = _scanned(prefix, dtype)
    if manifest is not None and found.sha256 != manifest.bin_sha256:
        raise InputError(_not_of_manifest(prefix, ".bin"))
    if found.smallest < 0 or found.largest >= vocab_size:
        raise InputError(_foreign_id(prefix, dtype, lengths, vocab_size))
    return lengths


def _check_index(prefix: str, lengths: np.ndarray, manifest: Manifest) -> None:
    if file_digest(Path(f"{prefix}.idx")) != manifest.idx_sha256:
        raise InputError(_not_of_manifest(prefix, ".idx"))
    for what, found, said in (
        ("documents", len(lengths), manifest.documents),
        ("tokens", int(lengths.sum(dtype=np.int64)), manifest.tokens),
    ):
        if found != said:
            raise InputError(
                f"--data-path {prefix}: {manifest_path(prefix).name} says {said:,} {what} and the "
                f"index has {found:,}; write the dataset again"
            )


def type_of_ids(prefix: str) -> np.dtype:
    """The type, from a checked index: Megatron's reader warns if torch.distributed is missing."""
    with open(f"{prefix}.idx", "rb") as stream:
        code = INDEX_HEADER.unpack(stream.read(INDEX_HEADER.size))[2]
    return np.dtype(DType.dtype_from_code(code))


def _hint(prefix: str) -> str:
    for near in (f"{prefix}_text_document", prefix.removesuffix(".bin").removesuffix(".idx")):
        if near != prefix and os.path.isfile(f"{near}.idx"):
            return f"did you mean {near}?"
    folder = os.path.dirname(prefix)
    if os.path.isfile(os.path.join(folder, "manifest.json")):
        return f"delete the folder {folder} and the embedded corpus is built again"
    return (
        "give the path of a .bin/.idx pair without its suffix (tools/preprocess_data.py writes one)"
    )


def _read_index(prefix: str) -> tuple[np.dtype, np.ndarray]:
    """Type of the ids and length of each sequence, after checking everything in the index."""
    path = f"{prefix}.idx"
    wrong = f"--data-path {prefix}: {path} is"
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        header = stream.read(INDEX_HEADER.size)
    if not header.startswith(MAGIC) and header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise InputError(f"{wrong} not an index of Megatron's (its first bytes differ)")
    if len(header) < INDEX_HEADER.size:
        raise InputError(f"{wrong} truncated at {size} bytes; write the dataset again")
    _, version, code, sequences, boundaries = INDEX_HEADER.unpack(header)
    try:
        dtype = np.dtype(DType.dtype_from_code(code))
    except ValueError:
        raise InputError(f"{wrong} of an unknown type of token (code {code})") from None
    if version != 1 or dtype.kind not in "iu":
        raise InputError(f"{wrong} of version {version} and type {dtype}; version 1 holds integers")
    expected = INDEX_HEADER.size + 12 * sequences + 8 * boundaries
    if size not in (expected, expected + sequences):  # multimodal data have a mode per sequence
        raise InputError(
            f"{wrong} {size:,} bytes long where its header describes {expected:,}; "
            "it is truncated or damaged, write the dataset again"
        )
    content = np.memmap(path, mode="r", offset=INDEX_HEADER.size, dtype=np.uint8)
    lengths = content[: 4 * sequences].view(np.int32).copy()
    offsets = content[4 * sequences : 12 * sequences].view(np.int64)
    ends = content[12 * sequences : 12 * sequences + 8 * boundaries].view(np.int64)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    consistent = (
        (lengths >= 0).all()
        and np.array_equal(offsets, starts * dtype.itemsize)
        and boundaries > 0
        and ends[0] == 0
        and ends[-1] == sequences
        and (np.diff(ends) >= 0).all()
    )
    if not consistent:
        raise InputError(f"{wrong} damaged (its offsets contradict its lengths); write it again")
    return dtype, lengths


@dataclass(frozen=True)
class _Scan:
    """The result of a scan of PREFIX.bin: the range of its ids, and its sha256."""

    smallest: int
    largest: int
    sha256: str


def _scanned(prefix: str, dtype: np.dtype) -> _Scan:
    """The scan of PREFIX.bin, or the stored result if the file has not changed since."""
    stamp = _stamp(prefix, dtype)
    try:
        known = read_sealed(_note_path(prefix))
        if known.pop("stamp") == stamp:
            return _Scan(**known)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no stored result, or not a valid one: scan
    found = _scan(prefix, dtype)
    try:
        write_sealed(_note_path(prefix), {"stamp": stamp, **asdict(found)})
    except OSError:
        pass  # on a read-only disk the data are scanned each time
    return found


def _scan(prefix: str, dtype: np.dtype) -> _Scan:
    ids = np.memmap(f"{prefix}.bin", mode="r", dtype=dtype)
    digest = hashlib.sha256()
    smallest, largest = int(ids[0]), int(ids[0])
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        digest.update(chunk.data)
        smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
    return _Scan(smallest, largest, digest.hexdigest())


def _note_path(prefix: str) -> Path:
    return Path(f"{prefix}.range.json")


def _stamp(prefix: str, dtype: np.dtype) -> dict[str, object]:
    """Values that differ after PREFIX.bin was written, moved or copied."""
    state = os.stat(f"{prefix}.bin")
    return {"bytes": state.st_size, "changed_ns": state.st_ctime_ns, "type": dtype.name}


def _not_of_manifest(prefix: str, suffix: str) -> str:
    return (
        f"--data-path {prefix}: {prefix}{suffix} is not the file that {manifest_path(prefix).name} "
        "describes (damaged, or another one): restore it, or write the dataset again "
        "(if it was meant to change, delete the manifest)"
    )


def _foreign_id(prefix: str, dtype: np.dtype, lengths: np.ndarray, vocab_size: int) -> str:
    """The message that names the first id outside the vocabulary and the document it is in."""
    ids = np.memmap(f"{prefix}.bin", mode="r", dtype=dtype)
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        wrong = np.flatnonzero((chunk < 0) | (chunk >= vocab_size))
        if len(wrong):
            break
    position = start + int(wrong[0])
    document = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), position, side="right"))
    return (
        f"--data-path {prefix}: document {document} holds token id {ids[position]}, outside the "
        f"vocabulary of {vocab_size}; give the tokenizer that wrote it (--tokenizer-model, "
        "--vocab-size)"
    )
