"""Writes Megatron indexed datasets in memory that does not grow with the number of documents.

Megatron-Core's own builder keeps some hundred bytes per document until the end, which is gigabytes
for a large corpus. The files here are the same, byte for byte. indexed.py describes the layout.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from moe_parallel.data.atomic_files import flush_to_disk, staging, uninterrupted
from moe_parallel.data.manifest import Manifest, Size, SourceFile, manifest_path, write_manifest
from moe_parallel.data.sealed import file_digest
from moe_parallel.errors import InputError

MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")

# Codes of the types of ids in an index.
_CODES = {np.dtype(np.uint16): 8, np.dtype(np.int32): 4}

# Documents whose entries are written at a time.
_SPAN = 2**18


@dataclass(frozen=True)
class WrittenDataset:
    """The numbers of documents and tokens in a written dataset."""

    documents: int
    tokens: int


def id_type(vocab_size: int) -> np.dtype:
    """Megatron's type for ids below `vocab_size`: uint16 if it is below 65,500, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


class IndexedWriter:
    """Writes PREFIX.bin, .idx and .manifest.json. `finish` completes them.

    The files have their names from the start, so the prefix should be in a temporary folder
    (atomic_files.staging).
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._prefix = prefix
        self._dtype = id_type(vocab_size)
        self._digest = hashlib.sha256()
        self._bin = open(f"{prefix}.bin", "wb")
        self._lengths = open(f"{prefix}.lengths", "w+b")
        self.documents = self.tokens = 0

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in (self._bin, self._lengths):
            try:
                stream.close()
            except OSError:  # the rest of the buffer, on a full disk: the first error counts
                if error is None:
                    raise

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
        self._lengths.write(lengths_N.data)
        self.documents += len(lengths_N)
        self.tokens += len(ids_T)

    def finish(
        self,
        *,
        tokenizer: str | None = None,
        seq_length: int | None = None,
        sources: Sequence[SourceFile] | None = None,
        domains: Mapping[str, Size] | None = None,
    ) -> WrittenDataset:
        """Write the index and the manifest, and flush all to the disk. See Manifest for the rest.

        Raises:
            InputError: there is no document.
        """
        if not self.documents:
            raise InputError(
                f"there is no text to write to {self._prefix.name}: the input is empty"
            )
        self._bin.close()
        idx = Path(f"{self._prefix}.idx")
        with idx.open("wb") as stream:
            self._write_index(stream)
        self._lengths.close()
        os.unlink(self._lengths.name)
        flush_to_disk(Path(f"{self._prefix}.bin"))
        flush_to_disk(idx)
        manifest = Manifest(
            documents=self.documents,
            tokens=self.tokens,
            bin_sha256=self._digest.hexdigest(),
            idx_sha256=file_digest(idx),
            tokenizer=tokenizer,
            seq_length=seq_length,
            sources=None if sources is None else tuple(sources),
            domains=None if domains is None else dict(domains),
        )
        write_manifest(self._prefix, manifest)
        return WrittenDataset(self.documents, self.tokens)

    def _write_index(self, stream: BinaryIO) -> None:
        count = self.documents
        stream.write(INDEX_HEADER.pack(MAGIC, 1, _CODES[self._dtype], count, count + 1))
        for lengths_N in self._written_lengths():
            stream.write(lengths_N.data)
        offset = 0
        for lengths_N in self._written_lengths():
            ends_N = offset + np.cumsum(lengths_N, dtype=np.int64) * self._dtype.itemsize
            stream.write(np.concatenate([[offset], ends_N[:-1]]).astype(np.int64).data)
            offset = int(ends_N[-1])
        for first in range(0, count + 1, _SPAN):
            stream.write(np.arange(first, min(first + _SPAN, count + 1), dtype=np.int64).data)

    def _written_lengths(self) -> Iterator[np.ndarray]:
        self._lengths.seek(0)
        while block := self._lengths.read(4 * _SPAN):
            yield np.frombuffer(block, dtype=np.int32)


def write_indexed(
    prefix: Path,
    documents: Iterable[list[int]],
    vocab_size: int,
    *,
    tokenizer: str | None = None,
    seq_length: int | None = None,
    sources: Sequence[SourceFile] | None = None,
) -> WrittenDataset:
    """Write documents (token ids, end of document included) as PREFIX.bin and PREFIX.idx.

    Memory does not grow with the text. The files are written in a temporary folder and the index is
    renamed last, so a killed writer leaves nothing that looks like a dataset. Empty documents are
    left out. An existing dataset is replaced: see check_new.

    Args:
        prefix: path without suffix.
        documents: token ids below `vocab_size`.
        vocab_size: of the tokenizer.
        tokenizer: its fingerprint; None: unknown.
        seq_length: the only --seq-length that the documents serve; None: any.
        sources: the files of text that they came from; None: unknown.

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
            written = writer.finish(tokenizer=tokenizer, seq_length=seq_length, sources=sources)
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
