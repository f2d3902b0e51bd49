"""Reads files of text: plain text, JSON lines and Parquet, compressed or not, in bounded memory.

A flag's words name files (`find_inputs`). Their content comes in batches (`read_batches`), which
are parsed by `records`, in other processes if need be.
"""

import bz2
import glob
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moe_parallel.data.indexed import SourceFile
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import rows_at_a_time

#: The most bytes of a line, or of a text in a row. A longer one is a bad record. The tokenizers
#: library needs about a hundred bytes of memory for each byte of a text.
LONGEST = 16 * 2**20
_TOO_LONG = f"longer than {LONGEST:,} bytes: divide the document"

# Text of about this many bytes goes to a worker together. It does not change the result.
_BATCH = 2**19
# Rows of a batch, at most.
_ROWS = 1024
_BLOCK = 2**20
# A .zst file can expand to 32,000 times its size, so little is unpacked at a time.
_PACKED_BLOCK = 2**10

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZ, _BZ2, _XZ, _ZST, _PARQUET = b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd", b"PAR1"
_MAGIC_OF = {".gz": _GZ, ".bz2": _BZ2, ".xz": _XZ, ".zst": _ZST, ".parquet": _PARQUET}

_PACKED = (".gz", ".zst", ".bz2", ".xz")
_PLAIN_TEXT = tuple(".txt" + packed for packed in ("", *_PACKED))
# Endings of the files with records that are taken from a folder. A plain .json there is usually
# metadata.
_RECORDS = (
    ".parquet",
    *(suffix + packed for suffix in (".jsonl", ".ndjson") for packed in ("", *_PACKED)),
    *(".json" + packed for packed in _PACKED),
)


@dataclass(frozen=True)
class InputFile:
    """A file of text.

    Attributes:
        path: as it is opened.
        domain: name of the folder that was named, or else of the folder that the file is in.
        size: bytes on the disk; None: not a regular file.
        flag: that names it, for messages.
    """

    path: Path
    domain: str
    size: int | None
    flag: str

    def __str__(self) -> str:
        return f"{self.flag} {self.path}"

    @property
    def is_plain_text(self) -> bool:
        """Whether the file is one document, and not records."""
        return self.path.name.lower().endswith(_PLAIN_TEXT)


@dataclass(frozen=True)
class Columns:
    """What is read of a record.

    Attributes:
        texts: names of the keys or columns with text; "a.b" is also b in the object or column a.
        domain: name of the key or column with the domain; None: it is the file's.
    """

    texts: tuple[str, ...]
    domain: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.texts if self.domain is None else (*self.texts, self.domain)


class Record(NamedTuple):
    """A text for each of `Columns.texts`, and the domain; `number` counts from 1."""

    number: int
    texts: list[str]
    domain: str


class Bad(NamedTuple):
    """A record that cannot be used, and the reason in a few words."""

    number: int
    reason: str


class Batch(NamedTuple):
    """Some records of a file as they were read.

    Attributes:
        unit: of the records. A document is a file of plain text, and has no other.
        first: number of the first record.
        domain: of the file.
        data: whole lines, of which the last may lack its line end; a document; rows with UTF-8 (or
            null) for each of `Columns.names`; None: a line that is too long to be read into memory.
    """

    unit: Literal["line", "document", "row"]
    first: int
    domain: str
    data: bytes | list[tuple[bytes | None, ...]] | None


def read_texts(path: Path, key: str = "text", flag: str = "--input") -> Iterator[str]:
    """Yield the text under `key` of every record of a file in a format of preprocess_data.py.

    Raises:
        InputError: the file cannot be read, or a record has no text; the message names `flag`, the
            file, and the line or row.
    """
    columns = Columns((key,))
    for file, batch, _ in read_batches(find_inputs([str(path)], flag), columns):
        for record in records(batch, columns):
            if isinstance(record, Bad):
                raise InputError(f"{file} {batch.unit} {record.number}: {record.reason}")
            yield record.texts[0]


def find_inputs(words: Sequence[str], flag: str = "--input") -> list[InputFile]:
    """The files that the words of a flag name, word by word, each word's in order of their paths.

    A word is a file; a folder, from which all files with the suffix of a known format are taken,
    at any depth, hidden ones excepted; or a pattern with `*`, `?`, `[...]` and `**`. Plain text is
    taken from a folder only if it has no records, because text next to records describes them.

    Raises:
        InputError: a word that names nothing, a folder without text, a file that is named twice, or
            a pipe or device that is found in a folder and not named.
    """
    seen: set[str] = set()
    found: list[InputFile] = []
    try:
        for path, folder in (each for word in words for each in _paths(word, flag)):
            os.stat(path)
            size = os.path.getsize(path) if os.path.isfile(path) else None
            domain = os.path.basename(os.path.realpath(folder or ".")) or "text"
            file, place = InputFile(Path(path), domain, size, flag), os.path.realpath(path)
            if place in seen:
                raise InputError(f"{flag} names {path} twice: name each file once")
            if size is None and file.path not in map(Path, words):
                raise InputError(
                    f"{file} is not a regular file: take it away, or name it as {flag}"
                )
            seen.add(place)
            found.append(file)
    except OSError as error:
        raise InputError(f"{flag} {error.filename} cannot be read ({error.strerror})") from None
    return found


def _paths(word: str, flag: str) -> Iterator[tuple[str, str]]:
    """The files that a word names, each with the folder that gives it its domain."""
    matches = [word]
    if not os.path.lexists(word) and glob.has_magic(word):
        matches = sorted(glob.glob(word, recursive=True))
        if not matches:
            raise InputError(f"{flag} {word} matches no file: check the pattern")
        # `**` also matches what is in a folder that it matches.
        matches = [each for each in matches if not os.path.isdir(each)] or matches
    for match in matches:
        if not os.path.isdir(match):
            yield match, os.path.dirname(match)
            continue
        inside = list(_files_in(match))
        taken = [each for each in inside if each.lower().endswith(_RECORDS)] or [
            each for each in inside if each.lower().endswith(_PLAIN_TEXT)
        ]
        if not taken:
            raise InputError(
                f"{flag} {match} is a folder without text: no file in it ends in .txt, .jsonl, "
                ".ndjson, .parquet, .txt.gz, .json.gz, .jsonl.zst or the like"
            )
        yield from ((each, match) for each in sorted(taken))


def _files_in(folder: str) -> Iterator[str]:
    """Those at any depth, hidden ones excepted."""

    def fail(error: OSError) -> None:
        raise error

    for place, inner, names in os.walk(folder, onerror=fail):
        inner[:] = [each for each in inner if not each.startswith(".")]
        yield from (os.path.join(place, name) for name in names if not name.startswith("."))


def read_batches(
    files: Sequence[InputFile], columns: Columns, sources: list[SourceFile] | None = None
) -> Iterator[tuple[InputFile, Batch, int]]:
    """Batches in order, each with its file and the bytes that were read from the disk for it.

    Args:
        files: to read.
        columns: to read.
        sources: gets path, size and digest of each file that was read to its end.

    Raises:
        InputError: a file that cannot be read, is damaged, or lacks a column.
    """
    for file in files:
        if file.is_plain_text and len(columns.texts) > 1:
            raise InputError(
                f"{file} is plain text, which has no keys, and --json-keys names "
                f"{len(columns.texts)}: name one, or leave the file out"
            )
    for file in files:
        with _DigestedFile(file) as raw:
            before = 0
            if raw.head == _PARQUET:
                first, size = 1, os.path.getsize(file.path)
                for rows, share in _rows(file, columns.names):
                    yield file, Batch("row", first, file.domain, rows), int(share * size) - before
                    first, before = first + len(rows), int(share * size)
            else:
                read = _document if file.is_plain_text else _lines
                for batch in read(_unpacked(raw), file.domain):
                    yield file, batch, raw.count - before
                    before = raw.count
            if sources is not None:
                sources.append(raw.described())


class _DigestedFile:
    """A file as it is on the disk; counts and digests the bytes that are read.

    Attributes:
        input: the file that is read.
        count: bytes read so far.
        head: the first four bytes.
    """

    def __init__(self, file: InputFile) -> None:
        """Raises InputError if the file cannot be read, or is not what its name says."""
        self.input = file
        self.count = 0
        self._digest = hashlib.sha256()
        try:
            self._opened = file.path.open("rb", buffering=0)
        except OSError as error:
            raise self._unreadable(error) from None
        self.head = self._rest = self._read(4)
        kind = file.path.suffix.lower()
        if not self.head.startswith(_MAGIC_OF.get(kind, b"")):
            self._opened.close()
            raise InputError(
                f"{file} is not a {kind} file (its first bytes differ): get it again, or "
                "rename it if it is another kind"
            )

    def __enter__(self) -> "_DigestedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        data, self._rest = self._rest or self._read(size), b""
        self.count += len(data)
        self._digest.update(data)
        return data

    def _read(self, size: int) -> bytes:
        try:
            return self._opened.read(size) or b""
        except OSError as error:
            raise self._unreadable(error) from None

    def described(self) -> SourceFile:
        """The whole file, of which the rest is read now."""
        while self.read(_BLOCK):
            pass
        return SourceFile(str(self.input.path), self.count, self._digest.hexdigest())

    def _unreadable(self, error: OSError) -> InputError:
        return InputError(f"{self.input} cannot be read ({error.strerror})")


def _unpacked(file: _DigestedFile) -> Iterator[bytes]:
    """The decompressed content in blocks of at most 32 MiB, usually 1 MiB.

    A file may have several streams, one after another. If the beginning of a later one is damaged,
    bz2.BZ2File and lzma.LZMAFile would leave out the rest of the file without an error.

    Raises:
        InputError: the file is damaged, or ends before its compressed content does.
    """
    begin: Callable[[], Any]
    limit: tuple[int, ...] = ()
    if file.head.startswith(_GZ):
        begin = lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)  # noqa: E731
    elif file.head.startswith(_BZ2):
        begin, limit = bz2.BZ2Decompressor, (_BLOCK,)
    elif file.head == _XZ:
        begin, limit = lzma.LZMADecompressor, (_BLOCK,)
    elif file.head == _ZST:
        zstandard = import_optional("zstandard", str(file.input))
        begin = lambda: zstandard.ZstdDecompressor().decompressobj()  # noqa: E731
    else:
        yield from iter(lambda: file.read(_BLOCK), b"")
        return
    padding = b"\0" if file.head.startswith(_GZ) else b""  # between streams and at the end
    stream, begun, data = begin(), False, b""
    waiting, size = [], 0
    while True:
        if getattr(stream, "needs_input", True):  # zlib and zstandard unpack all that they get
            data = data or file.read(_PACKED_BLOCK)
            if not data:
                break
            if not begun and not (data := data.lstrip(padding)):
                continue
        try:
            waiting.append(stream.decompress(data, *limit))
        except Exception as error:  # each library has its own
            reason = " ".join(str(error).split())
            raise InputError(
                f"{file.input} is damaged before byte {file.count:,} ({reason}): get it again"
            ) from None
        begun, data, size = True, b"", size + len(waiting[-1])
        if stream.eof:
            begun, data, stream = False, stream.unused_data, begin()
        if size >= _BLOCK:
            yield b"".join(waiting)
            waiting, size = [], 0
    if begun:
        raise InputError(f"{file.input} is truncated at {file.count:,} bytes: get it again")
    if size:
        yield b"".join(waiting)


def _document(content: Iterator[bytes], domain: str) -> Iterator[Batch]:
    """The one document of a file; of a file that is too long, only enough to see this."""
    kept: list[bytes] = []
    length = 0
    for block in content:
        if length <= LONGEST:
            kept.append(block)
            length += len(block)
    yield Batch("document", 1, domain, b"".join(kept).removeprefix(_BYTE_ORDER_MARK))


def _lines(content: Iterator[bytes], domain: str) -> Iterator[Batch]:
    """Whole lines of about _BATCH bytes."""
    number, length, skipping = 1, 0, False
    waiting: list[bytes] = []
    for piece in _pieces(content):
        end = piece.find(b"\n") + 1
        if skipping or length + max(end - 1, 0) > LONGEST:
            if not skipping:
                yield Batch("line", number, domain, None)
            waiting, length, skipping = [], 0, not end
            number, piece = number + bool(end), piece[end:] if end else b""
        end = piece.rfind(b"\n") + 1
        if end:
            data = b"".join([*waiting, piece[:end]])
            yield Batch("line", number, domain, data)
            number += data.count(b"\n")
            waiting, length, piece = [], 0, piece[end:]
        waiting.append(piece)
        length += len(piece)
        if length > LONGEST:
            yield Batch("line", number, domain, None)
            waiting, length, skipping = [], 0, True
    if length:
        yield Batch("line", number, domain, b"".join(waiting))


def _pieces(content: Iterator[bytes]) -> Iterator[bytes]:
    mark = _BYTE_ORDER_MARK
    for block in content:
        block, mark = block.removeprefix(mark), b""
        for start in range(0, len(block), _BATCH):
            yield block[start : start + _BATCH]


def _rows(
    file: InputFile, names: Sequence[str]
) -> Iterator[tuple[list[tuple[bytes | None, ...]], float]]:
    """Some rows of a Parquet file, and the share of rows read before them.

    The memory is that of some pages of the file, not of a row group, and of MOST_OF_ROWS bytes.
    Values are not checked to be UTF-8; None is null.

    Raises:
        InputError: pyarrow is not installed; the file is damaged, or lacks a column with text.
    """
    parquet = import_optional("pyarrow.parquet", str(file))
    arrow = import_optional("pyarrow", str(file))
    try:
        with parquet.ParquetFile(file.path, buffer_size=_BLOCK, pre_buffer=False) as opened:
            types = dict(_types(arrow, opened.schema_arrow))
            for name in names:
                _check_column(arrow, types, name, file)
            done, count = 0, opened.metadata.num_rows
            batches = opened.iter_batches(
                batch_size=rows_at_a_time(opened.metadata), columns=list(names), use_threads=False
            )
            waiting: list[tuple[bytes | None, ...]] = []
            size = 0
            for batch in batches:
                for row in zip(*(_values(arrow, batch, name) for name in names), strict=True):
                    length = sum(len(value or b"") for value in row)
                    if waiting and (size + length > _BATCH or len(waiting) == _ROWS):
                        yield waiting, done / count
                        waiting, size = [], 0
                    waiting.append(row)
                    size += length
                    done += 1
            if waiting:
                yield waiting, done / count
            if done != count:
                raise InputError(f"{file} is damaged ({done:,} rows of {count:,}): get it again")
    except (arrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{file} is damaged ({reason}): get it again") from None


def _types(arrow: Any, fields: Any, outer: str = "") -> Iterator[tuple[str, Any]]:
    """The names and types of columns, and those of the fields in them: "column.field"."""
    for field in fields:
        if not outer or "." not in field.name:
            yield outer + field.name, field.type
        if arrow.types.is_struct(field.type) and "." not in field.name:
            yield from _types(arrow, field.type, f"{outer}{field.name}.")


def _check_column(arrow: Any, types: dict[str, Any], name: str, file: InputFile) -> None:
    def is_text(kind: Any) -> bool:
        kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
        names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
        return any(getattr(arrow.types, f"is_{name}")(kind) for name in names)

    texts = [each for each, kind in types.items() if is_text(kind)]
    known = f"(columns with text: {_quoted(texts)}): see --json-keys"
    if name not in types:
        raise InputError(f"{file} has no column {name!r} {known}")
    if name not in texts:
        raise InputError(f"{file} has {types[name]} in column {name!r}, not text {known}")


def _values(arrow: Any, batch: Any, name: str) -> list[bytes | None]:
    """A column, as bytes: pyarrow would raise an error for the first text that is not UTF-8."""
    outer, *fields = [name] if name in batch.schema.names else name.split(".")
    column = batch.column(outer)
    for field in fields:
        column = column.flatten()[column.type.get_field_index(field)]  # null where the column is
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    large = arrow.types.is_large_string(column.type) or arrow.types.is_large_binary(column.type)
    return column.cast(arrow.large_binary() if large else arrow.binary()).to_pylist()


def records(batch: Batch, columns: Columns) -> Iterator[Record | Bad]:
    """The records of a batch. Empty lines are left out."""
    if batch.data is None:
        yield Bad(batch.first, _TOO_LONG)
        return
    data: Sequence[Any] = batch.data
    if isinstance(batch.data, bytes):
        data = batch.data.split(b"\n") if batch.unit == "line" else [batch.data]
    for number, raw in enumerate(data, start=batch.first):
        if batch.unit == "line" and (not raw or raw.isspace()):
            continue
        try:
            if batch.unit == "document":
                yield Record(number, [_utf8(raw)], batch.domain)
                continue
            if batch.unit == "line":
                parsed = _parsed(raw)
                found = [_text(parsed, name) for name in columns.names]
            else:
                found = [_decoded(*each) for each in zip(raw, columns.names, strict=True)]
        except InputError as error:
            yield Bad(number, str(error))
            continue
        domain = batch.domain if columns.domain is None else found.pop()
        yield Record(number, found, domain)


def _parsed(line: bytes) -> dict[str, Any]:
    text = _utf8(line)
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON ({error.msg}, column {error.colno})") from None
    except ValueError:
        raise InputError("a number with too many digits") from None
    except RecursionError:
        raise InputError("nested too deeply") from None
    if not isinstance(record, dict):
        raise InputError("not a JSON object: expected one {...} per line")
    return record


def _text(record: dict[str, Any], key: str) -> str:
    """What is under the key, or, under "a.b", what is under b in the object under a."""
    value: Any = record
    for part in [key] if key in record else key.split("."):
        if not isinstance(value, dict) or part not in value:
            known = _quoted(list(record))
            raise InputError(f"no key {key!r} (its keys: {known}): see --json-keys")
        value = value[part]
    if not isinstance(value, str):
        raise InputError(f"{type(value).__name__}, not text, under {key!r}")
    # Half of a surrogate pair, which JSON can contain but UTF-8 cannot, becomes "?".
    return value if value.isascii() else value.encode("utf-8", errors="replace").decode("utf-8")


def _decoded(value: bytes | None, column: str) -> str:
    if value is None:
        raise InputError(f"no text under {column!r} (null)")
    return _utf8(value, f" under {column!r}")


def _utf8(value: bytes, where: str = "") -> str:
    if len(value) > LONGEST:
        raise InputError(_TOO_LONG)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        remedy = "convert it, as iconv -f latin1 -t utf-8 does"
        raise InputError(f"not UTF-8{where} (byte {error.start + 1}): {remedy}") from None


def _quoted(names: Sequence[str]) -> str:
    """Some names for an error message: the first ten, shortened."""
    listed = [repr(name[:40]) for name in names[:10]] + ["..."] * (len(names) > 10)
    return ", ".join(listed) or "none"
