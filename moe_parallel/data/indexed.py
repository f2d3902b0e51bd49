"""Megatron indexed datasets: `PREFIX.bin` has token ids, `PREFIX.idx` the place of each document.

Megatron-Core's own classes read them. Three things are added to its format: a pair of files is
published completely or not at all, it has a manifest, and the error for a bad file is one line.

The manifest, `PREFIX.manifest.json`, has checksums of both files. The index, which training reads
completely anyway, is compared each time. PREFIX.bin may be terabytes: it is compared once, and
again when the file system reports that it has changed or is a copy (`st_ctime`, which only a write,
a rename and the like can set). `PREFIX.range.json` contains the result; without it, the file is
read again. Datasets that Megatron's own tools wrote have no manifest and are used unchecked.

Layout of an index (little-endian): b"MMIDIDX\\0\\0", version u64 = 1, type code u8, number of
sequences u64, number of documents u64 (one more than there are), lengths i32, byte offsets i64,
document boundaries i64, and for multimodal data a mode i8 a sequence.
"""

import dataclasses
import hashlib
import os
import struct
from array import array
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_parallel.data.atomic_files import flush_to_disk, staging, uninterrupted
from moe_parallel.data.sealed import file_digest, read_sealed, write_sealed
from moe_parallel.errors import InputError

#: A label and the amount of work (None: unknown) -> a context that gives a function, which receives
#: the amount of work done since its last call.
ShowProgress = Callable[[str, int | None], AbstractContextManager[Callable[[int], object]]]

#: Every id in an indexed dataset that Megatron wrote is below this.
ANY_VOCABULARY = 2**31

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# By code, from 1 on: to import Megatron-Core for them would take seconds in each worker.
_TYPES = [np.dtype(name) for name in "u1 i1 i2 i4 i8 f8 f4 u2".split()]

# Tokens read at a time when a .bin file is scanned: 32 to 64 MiB of memory.
_CHUNK = 16 * 2**20

_FORMAT = 3


class Size(NamedTuple):
    """The numbers of documents and tokens of a dataset."""

    documents: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content and origin of PREFIX.bin and PREFIX.idx. The same documents give the same manifest.

    Attributes:
        documents, tokens: numbers of these in the dataset.
        bin_sha256, idx_sha256: of the files.
        tokenizer: fingerprint of the tokenizer that produced the ids; None: unknown.
        seq_length: the --seq-length for which the documents were cut; None: any.
        sources: paths of the files of text, in the order in which they were read; None: unknown.
    """

    documents: int
    tokens: int
    bin_sha256: str
    idx_sha256: str
    tokenizer: str | None = None
    seq_length: int | None = None
    sources: tuple[str, ...] | None = None


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.manifest.json")  # not with_suffix: a prefix may contain dots


def read_manifest(prefix: str | Path) -> Manifest | None:
    """The manifest of a dataset; None if it has none.

    Raises:
        InputError: a manifest that is damaged, or of another format.
    """
    path = manifest_path(prefix)
    if not os.path.lexists(path):
        return None
    wrong = f"--data-path {prefix}: {path}"
    remedy = "restore it, or delete it to use the dataset unchecked"
    try:
        content = read_sealed(path)
    except ValueError as error:
        raise InputError(f"{wrong} is damaged ({error}); {remedy}") from None
    except OSError as error:
        raise InputError(f"{wrong} cannot be read ({error.strerror}); {remedy}") from None
    try:
        found, sources = content.pop("format"), content.pop("sources", None)
        if found not in (1, 2, _FORMAT):
            raise KeyError(found)
        if found != _FORMAT:  # 2 had sizes by domain, and digests of the sources
            content.pop("domains", None)
            sources = sources and [each["path"] for each in sources]
        manifest = Manifest(**content, sources=None if sources is None else tuple(sources))
        for name in content:
            if not isinstance(content[name], Manifest.__annotations__[name]):
                raise TypeError(name)
    except (AttributeError, KeyError, TypeError):
        raise InputError(
            f"{wrong} is not of format {_FORMAT}, which this program reads: a field is missing, "
            f"new or of another type; {remedy}"
        ) from None
    return manifest


def id_type(vocab_size: int) -> np.dtype:
    """Megatron's type for ids below `vocab_size`: uint16 if it is below 65,500, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


class IndexedWriter:
    """Writes PREFIX.bin, .idx and .manifest.json. `finish` completes them.

    The bytes are those of Megatron-Core's builder, which keeps some hundred bytes per document
    until the end; this one keeps 4. The files have their names from the start, so the prefix should
    be in a temporary folder (atomic_files.staging).
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._prefix = prefix
        self._dtype = id_type(vocab_size)
        self._digest = hashlib.sha256()
        self._bin = open(f"{prefix}.bin", "wb")
        self._lengths = array("i")
        self._tokens = 0

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._bin.close()

    def add(self, lengths_N: np.ndarray, ids_T: np.ndarray) -> None:
        """Append N documents.

        Args:
            lengths_N: int32, tokens of each document, at least 1.
            ids_T: ids of all of them in the type `id_type(vocab_size)`.
        """
        assert ids_T.dtype == self._dtype and lengths_N.dtype == np.int32
        assert lengths_N.sum(dtype=np.int64) == len(ids_T)
        self._digest.update(ids_T.data)
        self._bin.write(ids_T.data)
        self._lengths.frombytes(lengths_N.tobytes())
        self._tokens += len(ids_T)

    def finish(self, **origin: Any) -> Size:
        """Write the index and the manifest, and flush all to the disk.

        Args:
            origin: tokenizer, seq_length and sources of Manifest, if they are known.

        Raises:
            InputError: there is no document.
        """
        count = len(self._lengths)
        if not count:
            raise InputError(
                f"there is no text to write to {self._prefix.name}: the input is empty"
            )
        self._bin.close()
        idx = Path(f"{self._prefix}.idx")
        lengths_N = np.frombuffer(self._lengths, dtype=np.int32)
        offsets_N = np.cumsum(lengths_N, dtype=np.int64)
        offsets_N -= lengths_N
        offsets_N *= self._dtype.itemsize
        with idx.open("wb") as stream:
            code = 1 + _TYPES.index(self._dtype)
            stream.write(_HEADER.pack(_MAGIC, 1, code, count, count + 1))
            for part in (lengths_N, offsets_N, np.arange(count + 1, dtype=np.int64)):
                stream.write(part.data)
        flush_to_disk(Path(f"{self._prefix}.bin"))
        flush_to_disk(idx)
        manifest = Manifest(
            documents=count,
            tokens=self._tokens,
            bin_sha256=self._digest.hexdigest(),
            idx_sha256=file_digest(idx),
            **origin,
        )
        content = {"format": _FORMAT, **dataclasses.asdict(manifest)}
        write_sealed(manifest_path(self._prefix), content)
        return Size(count, self._tokens)


def write_indexed(
    prefix: Path, documents: Iterable[list[int]], vocab_size: int, **origin: Any
) -> Size:
    """Write documents (token ids, end of document included) as PREFIX.bin and PREFIX.idx.

    The files are written in a temporary folder and the index is renamed last, so a killed writer
    leaves nothing that looks like a dataset. Empty documents are left out. An existing dataset is
    replaced: see check_new.

    Args:
        prefix: path without suffix.
        documents: token ids below `vocab_size`.
        vocab_size: of the tokenizer.
        origin: see IndexedWriter.finish.

    Raises:
        InputError: there is no document.
    """
    dtype = id_type(vocab_size)
    with staging(prefix) as folder:
        temporary = folder / prefix.name
        with IndexedWriter(temporary, vocab_size) as writer:
            for ids in documents:
                if ids:
                    assert max(ids) < vocab_size, (max(ids), vocab_size)
                    writer.add(np.array([len(ids)], dtype=np.int32), np.array(ids, dtype=dtype))
            written = writer.finish(**origin)
        with uninterrupted():
            move_indexed(temporary, prefix)
    return written


def check_new(prefix: Path | str, overwrite: bool) -> None:
    """Raise InputError if PREFIX.bin or PREFIX.idx exists and is not to be overwritten."""
    for suffix in (".bin", ".idx"):
        if not overwrite and os.path.lexists(f"{prefix}{suffix}"):
            raise InputError(
                f"{prefix}{suffix} exists: give another --output-prefix, or --overwrite"
            )


def move_indexed(source: Path, target: Path) -> None:
    """Rename a dataset to another prefix on the same disk; replaces a dataset that is there."""
    Path(f"{target}.idx").unlink(missing_ok=True)
    os.replace(f"{source}.bin", f"{target}.bin")
    os.replace(manifest_path(source), manifest_path(target))
    os.replace(f"{source}.idx", f"{target}.idx")


def check_indexed(prefix: str, vocab_size: int) -> np.ndarray:
    """Check that PREFIX.bin and PREFIX.idx are complete and fit each other and the vocabulary.

    Both are compared with PREFIX.manifest.json if it exists, as described at the top of this file.

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
    if manifest is not None and file_digest(Path(f"{prefix}.idx")) != manifest.idx_sha256:
        raise InputError(_not_of_manifest(prefix, ".idx"))
    found = _scanned(prefix, dtype)
    if manifest is not None and found["sha256"] != manifest.bin_sha256:
        raise InputError(_not_of_manifest(prefix, ".bin"))
    if found["smallest"] < 0 or found["largest"] >= vocab_size:
        raise InputError(_foreign_id(prefix, dtype, lengths, vocab_size))
    return lengths


def type_of_ids(prefix: str) -> np.dtype:
    """The type of the ids, from a checked index."""
    with open(f"{prefix}.idx", "rb") as stream:
        code = _HEADER.unpack(stream.read(_HEADER.size))[2]
    return _TYPES[code - 1]


def _hint(prefix: str) -> str:
    for near in (f"{prefix}_text_document", prefix.removesuffix(".bin").removesuffix(".idx")):
        if near != prefix and os.path.isfile(f"{near}.idx"):
            return f"did you mean {near}?"
    folder = os.path.dirname(prefix)
    if os.path.basename(folder).startswith("python-vocab"):
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
        header = stream.read(_HEADER.size)
    if not header.startswith(_MAGIC) and header[: len(_MAGIC)] != _MAGIC[: len(header)]:
        raise InputError(f"{wrong} not an index of Megatron's (its first bytes differ)")
    if len(header) < _HEADER.size:
        raise InputError(f"{wrong} truncated at {size} bytes; write the dataset again")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if not 1 <= code <= len(_TYPES):
        raise InputError(f"{wrong} of an unknown type of token (code {code})")
    dtype = _TYPES[code - 1]
    if version != 1 or dtype.kind not in "iu":
        raise InputError(f"{wrong} of version {version} and type {dtype}; version 1 holds integers")
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    if size not in (expected, expected + sequences):  # multimodal data have a mode per sequence
        raise InputError(
            f"{wrong} {size:,} bytes long where its header describes {expected:,}; "
            "it is truncated or damaged, write the dataset again"
        )
    content = np.memmap(path, mode="r", offset=_HEADER.size, dtype=np.uint8)
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


def _scanned(prefix: str, dtype: np.dtype) -> dict[str, Any]:
    """The range of the ids in PREFIX.bin, and its sha256: stored, unless the file has changed."""
    note, state = Path(f"{prefix}.range.json"), os.stat(f"{prefix}.bin")
    stamp = {"bytes": state.st_size, "changed_ns": state.st_ctime_ns, "type": dtype.name}
    with suppress(OSError, ValueError):  # no stored result, or not a valid one
        known = read_sealed(note)
        types = {"smallest": int, "largest": int, "sha256": str}
        if known.pop("stamp", None) == stamp and types == {k: type(v) for k, v in known.items()}:
            return known
    ids = np.memmap(f"{prefix}.bin", mode="r", dtype=dtype)
    digest = hashlib.sha256()
    smallest, largest = int(ids[0]), int(ids[0])
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        digest.update(chunk.data)
        smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
    found = {"smallest": smallest, "largest": largest, "sha256": digest.hexdigest()}
    with suppress(OSError):  # on a read-only disk the data are scanned each time
        write_sealed(note, {"stamp": stamp, **found})
    return found


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
