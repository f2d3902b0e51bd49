"""Reads files of text as batches of records, in order and in bounded memory."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moe_parallel.data.indexed import SourceFile
from moe_parallel.data.preprocess.compressed import PARQUET, DigestedFile, blocks
from moe_parallel.data.preprocess.inputs import InputFile
from moe_parallel.data.preprocess.parquet import read_columns
from moe_parallel.data.preprocess.records import (
    LONGEST,
    Columns,
    Lines,
    PlainText,
    Rows,
    TooLong,
)
from moe_parallel.errors import InputError

# Lines of about this many bytes go to a worker together. It does not change the result.
_BATCH = 2**19

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

RawBatch = Lines | PlainText | Rows | TooLong


class ReadBatch(NamedTuple):
    """A batch, the file it is from, and the bytes that were read from the disk for it."""

    file: InputFile
    batch: RawBatch
    read: int


class Reader:
    """The batches of some files; `sources` describes the files that have been read to their end.

    Attributes:
        files: to read, in order.
        columns: to read.
        sources: path, size and digest of each file that was read.
    """

    def __init__(self, files: Sequence[InputFile], columns: Columns, digest: bool = True) -> None:
        """`digest`: whether Parquet files are read whole, and listed in `sources`."""
        self.files = files
        self.columns = columns
        self.sources: list[SourceFile] = []
        self._digest = digest

    def batches(self) -> Iterator[ReadBatch]:
        """
        Raises:
            InputError: a file that cannot be read, is damaged, or lacks a column.
        """
        for file in self.files:
            self._check_keys(file)
        for file in self.files:
            with DigestedFile(file) as raw:
                if raw.head == PARQUET:
                    yield from self._of_parquet(file, raw)
                    continue
                before = 0
                read = _whole if file.is_plain_text else _lines
                for batch in read(blocks(raw), file.domain):
                    yield ReadBatch(file, batch, raw.count - before)
                    before = raw.count
                digest = raw.sha256()
            self.sources.append(SourceFile(str(file.path), raw.count, digest))

    def _of_parquet(self, file: InputFile, raw: DigestedFile) -> Iterator[ReadBatch]:
        size, row, done = os.path.getsize(file.path), 0, 0
        for values, share in read_columns(file, self.columns.names):
            read = int(share * size)
            yield ReadBatch(file, Rows(row + 1, file.domain, values), read - done)
            row, done = row + len(values[0]), read
        if self._digest:
            digest = raw.sha256()
            self.sources.append(SourceFile(str(file.path), raw.count, digest))

    def _check_keys(self, file: InputFile) -> None:
        keys = self.columns.texts
        if file.is_plain_text and len(keys) > 1:
            raise InputError(
                f"{file} is plain text, which has no keys, and --json-keys names {len(keys)}: name "
                "one, or leave the file out"
            )


def _whole(content: Iterator[bytes], domain: str) -> Iterator[PlainText]:
    """The one document of a file; of a file that is too long, only enough to see this."""
    kept: list[bytes] = []
    length = 0
    for block in content:
        if length <= LONGEST:
            kept.append(block)
            length += len(block)
    yield PlainText(domain, b"".join(kept).removeprefix(_BYTE_ORDER_MARK))


def _lines(content: Iterator[bytes], domain: str) -> Iterator[Lines | TooLong]:
    """Whole lines of about _BATCH bytes, numbered from 1."""
    number, length, skipping = 1, 0, False
    waiting: list[bytes] = []
    for piece in _pieces(content):
        end = piece.find(b"\n") + 1
        if skipping or length + max(end - 1, 0) > LONGEST:
            if not skipping:
                yield TooLong(number, domain)
            waiting, length, skipping = [], 0, not end
            number, piece = number + bool(end), piece[end:] if end else b""
        end = piece.rfind(b"\n") + 1
        if end:
            data = b"".join([*waiting, piece[:end]])
            yield Lines(number, domain, data)
            number += data.count(b"\n")
            waiting, length, piece = [], 0, piece[end:]
        waiting.append(piece)
        length += len(piece)
        if length > LONGEST:
            yield TooLong(number, domain)
            waiting, length, skipping = [], 0, True
    if length:
        yield Lines(number, domain, b"".join(waiting))


def _pieces(content: Iterator[bytes]) -> Iterator[bytes]:
    first = True
    for block in content:
        if first:
            block, first = block.removeprefix(_BYTE_ORDER_MARK), False
        for start in range(0, len(block), _BATCH):
            yield block[start : start + _BATCH]
