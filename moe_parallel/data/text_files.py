"""Reads files of text: plain text, JSON lines and Parquet, compressed or not, in bounded memory."""

import gzip
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import first_line, rows_at_a_time

#: The most bytes of a text or a line. A longer one is a bad record. The tokenizers library needs
#: about a hundred bytes of memory for each byte of a text.
LONGEST = 16 * 2**20
_BLOCK = 2**20

_PACKED = ("", ".gz", ".bz2", ".zst", ".xz")
_PLAIN_TEXT = tuple(".txt" + packed for packed in _PACKED)
# Endings of the files with records that are taken from a folder. A plain .json there is usually
# metadata.
_RECORDS = (
    ".parquet",
    *(suffix + packed for suffix in (".jsonl", ".ndjson") for packed in _PACKED),
    *(".json" + packed for packed in _PACKED[1:]),
)


@dataclass(frozen=True)
class InputFile:
    """A file of text.

    Attributes:
        path: as it is opened.
        size: bytes on the disk; None: not a regular file.
        flag: that names it, for messages.
    """

    path: Path
    size: int | None
    flag: str

    def __str__(self) -> str:
        return f"{self.flag} {self.path}"


class Record(NamedTuple):
    """A text for each key."""

    place: str  # "--input a.jsonl line 3": where it is, from 1 on
    texts: list[str]


class Bad(NamedTuple):
    """A record that cannot be used, and the reason in a few words."""

    place: str
    reason: str


def read_texts(path: Path, key: str = "text", flag: str = "--input") -> Iterator[str]:
    """Yield the text under `key` of every record of a file in a format of preprocess_data.py.

    Raises:
        InputError: the file cannot be read, or a record has no text; the message names `flag`, the
            file, and the line or row.
    """
    for record in read_records(find_inputs([str(path)], flag), [key]):
        if isinstance(record, Bad):
            raise InputError(f"{record.place}: {record.reason}")
        yield record.texts[0]


def find_inputs(words: Sequence[str], flag: str = "--input") -> list[InputFile]:
    """The files that the words of a flag name, word by word, a folder's in order of their paths.

    A word is a file, or a folder, from which all files with the suffix of a known format are taken,
    at any depth, hidden ones excepted. Plain text is taken from a folder only if it has no records,
    because text next to records describes them.

    Raises:
        InputError: a word that names nothing, a folder without text, a file that is named twice, or
            a pipe or device that is found in a folder and not named.
    """
    found: dict[str, InputFile] = {}
    try:
        for word in words:
            for path in _files_in(word, flag) if os.path.isdir(word) else [word]:
                os.stat(path)
                size = os.path.getsize(path) if os.path.isfile(path) else None
                if size is None and path != word:
                    raise InputError(f"{flag} {path} is not a regular file: take it away")
                if os.path.realpath(path) in found:
                    raise InputError(f"{flag} names {path} twice: name each file once")
                found[os.path.realpath(path)] = InputFile(Path(path), size, flag)
    except OSError as error:
        raise InputError(f"{flag} {error.filename} cannot be read ({error.strerror})") from None
    return list(found.values())


def _files_in(folder: str, flag: str) -> list[str]:
    def fail(error: OSError) -> None:
        raise error

    inside: list[str] = []
    for place, inner, names in os.walk(folder, onerror=fail):
        inner[:] = [each for each in inner if not each.startswith(".")]
        inside += [os.path.join(place, name) for name in names if not name.startswith(".")]
    for endings in (_RECORDS, _PLAIN_TEXT):
        if taken := [each for each in inside if each.lower().endswith(endings)]:
            return sorted(taken)
    raise InputError(
        f"{flag} {folder} is a folder without text: no file in it ends in .txt, .jsonl, .ndjson, "
        ".parquet, .txt.gz, .json.gz, .jsonl.zst or the like"
    )


def read_records(
    files: Sequence[InputFile],
    keys: Sequence[str],
    advance: Callable[[int], object] = lambda count: None,
) -> Iterator[Record | Bad]:
    """The records of files, in order. Empty lines are left out.

    Args:
        files: to read.
        keys: names of the keys or columns with text. Plain text is under any one key.
        advance: receives the bytes that were read from the disk since its last call.

    Raises:
        InputError: a file that cannot be read, is damaged, or lacks a column.
    """
    for file in files:
        if len(keys) > 1 and file.path.name.lower().endswith(_PLAIN_TEXT):
            raise InputError(
                f"{file} is plain text, which has no keys, and --json-keys names {len(keys)}: "
                "name one, or leave the file out"
            )
    for file in files:
        name = file.path.name.lower()
        unit, read = "line", _lines
        if name.endswith(".parquet"):
            unit, read = "row", _rows
        elif name.endswith(_PLAIN_TEXT):
            unit, read = "document", _document
        try:
            for number, raw in enumerate(read(file, keys, advance), start=1):
                place = f"{file} {unit} {number}"
                try:
                    if texts := _texts(raw, keys, unit):
                        yield Record(place, texts)
                except InputError as error:
                    yield Bad(place, str(error))
        except InputError:
            raise
        except Exception as error:  # each library has its own
            if reason := getattr(error, "strerror", None):
                raise InputError(f"{file} cannot be read ({reason})") from None
            raise InputError(f"{file} is damaged ({first_line(error)}): get it again") from None


def _lines(file: InputFile, keys: Sequence[str], advance: Callable[[int], object]) -> Iterator[Any]:
    """Whole lines; of one that is too long, a part that is too long, too."""
    with file.path.open("rb", buffering=0) as raw:
        stream, read = _unpacked(file, raw), 0
        while line := stream.readline(LONGEST + 1):
            yield line
            while line and not line.endswith(b"\n"):  # the rest of it
                line = stream.readline(LONGEST + 1)
            if file.size is not None:
                advance(raw.tell() - read)
                read = raw.tell()


def _document(
    file: InputFile, keys: Sequence[str], advance: Callable[[int], object]
) -> Iterator[Any]:
    with file.path.open("rb", buffering=0) as raw:
        yield _unpacked(file, raw).read(LONGEST + 1)
    advance(file.size or 0)


def _unpacked(file: InputFile, raw: io.FileIO) -> io.BufferedIOBase:
    """The decompressed content, which raises an error where it is damaged or truncated."""
    suffix = file.path.suffix.lower()
    if suffix == ".xz":
        raise InputError(f"{file} is a format that is not read: unpack it (xz -d)")
    if suffix in _PACKED and file.size == 0:
        raise InputError(f"{file} is empty: get it again")
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=io.BufferedReader(raw, _BLOCK))
    if suffix in (".bz2", ".zst"):
        # bz2.BZ2File would leave out, without an error, what follows a damaged stream.
        arrow = import_optional("pyarrow", str(file))
        unpacked = arrow.CompressedInputStream(raw, {".bz2": "bz2", ".zst": "zstd"}[suffix])
        return io.BufferedReader(unpacked, _BLOCK)
    return io.BufferedReader(raw, _BLOCK)


def _rows(file: InputFile, keys: Sequence[str], advance: Callable[[int], object]) -> Iterator[Any]:
    """Rows of a Parquet file, in the memory of some pages of it, and of MOST_OF_ROWS bytes."""
    parquet = import_optional("pyarrow.parquet", str(file))
    with parquet.ParquetFile(file.path, buffer_size=_BLOCK, pre_buffer=False) as opened:
        names, metadata = opened.schema_arrow.names, opened.metadata
        for key in keys:
            if key not in names:
                raise InputError(
                    f"{file} has no column {key!r} (its columns: {_quoted(names)}): see --json-keys"
                )
        read, done = 0, 0
        for batch in opened.iter_batches(
            batch_size=rows_at_a_time(metadata), columns=list(keys), use_threads=False
        ):
            yield from batch.to_pylist()
            done += len(batch)
            advance((file.size or 0) * done // metadata.num_rows - read)
            read = (file.size or 0) * done // metadata.num_rows


def _texts(raw: bytes | dict[str, Any], keys: Sequence[str], unit: str) -> list[str]:
    """A text for each key; none for an empty line. Raises InputError with the reason."""
    record: Any = raw
    if isinstance(raw, bytes):
        if len(raw.rstrip(b"\r\n") if unit == "line" else raw) > LONGEST:
            raise InputError(f"longer than {LONGEST:,} bytes: divide the document")
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            remedy = "convert it, as iconv -f latin1 -t utf-8 does"
            raise InputError(f"not UTF-8 (byte {error.start + 1}): {remedy}") from None
        if unit == "document":
            return [text]
        if not text.strip():
            return []
        try:
            record = json.loads(text.rstrip())
        except json.JSONDecodeError as error:
            raise InputError(f"not JSON ({error.msg}, column {error.colno})") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"not JSON ({first_line(error)})") from None
        if not isinstance(record, dict):
            raise InputError("not a JSON object: expected one {...} per line")
    return [_text(record, key) for key in keys]


def _text(record: dict[str, Any], key: str) -> str:
    if key not in record:
        raise InputError(f"no key {key!r} (its keys: {_quoted(list(record))}): see --json-keys")
    value = record[key]
    if not isinstance(value, str):
        raise InputError(f"{type(value).__name__}, not text, under {key!r}")
    if len(value) > LONGEST:
        raise InputError(f"longer than {LONGEST:,} bytes: divide the document")
    # Half of a surrogate pair, which JSON can contain but UTF-8 cannot, becomes "?".
    return value if value.isascii() else value.encode("utf-8", errors="replace").decode("utf-8")


def _quoted(names: Sequence[str]) -> str:
    """Some names for an error message: the first ten, shortened."""
    listed = [repr(name[:40]) for name in names[:10]] + ["..."] * (len(names) > 10)
    return ", ".join(listed) or "none"
