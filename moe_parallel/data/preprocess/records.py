"""Batches of records, as read from a file, and the texts in them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_parallel.errors import InputError

#: The most bytes of a line, or of a text in a row. A longer one is a bad record. The tokenizers
#: library needs about a hundred bytes of memory for each byte of a text.
LONGEST = 16 * 2**20
_TOO_LONG = f"longer than {LONGEST:,} bytes: divide the document"


@dataclass(frozen=True)
class Columns:
    """What is read of a record.

    Attributes:
        texts: names of the keys or columns with text; each becomes a dataset.
        domain: name of the key or column with the domain; None: it is the file's.
    """

    texts: tuple[str, ...]
    domain: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.texts if self.domain is None else (*self.texts, self.domain)


@dataclass(frozen=True)
class Record:
    """A text for each of `Columns.texts`, and the domain; `number` counts lines or rows from 1."""

    number: int
    texts: list[str]
    domain: str


@dataclass(frozen=True)
class Bad:
    """A record that cannot be used, and the reason in a few words."""

    number: int
    reason: str


@dataclass(frozen=True)
class Lines:
    """Some lines of a JSON lines file.

    Attributes:
        first: number of the first line.
        domain: of the file.
        data: whole lines; the last may lack its line end.
    """

    first: int
    domain: str
    data: bytes

    unit = "line"

    @property
    def size(self) -> int:
        return len(self.data)

    def records(self, columns: Columns) -> Iterator[Record | Bad]:
        """The lines that are not empty."""
        for number, line in enumerate(self.data.split(b"\n"), start=self.first):
            if line and not line.isspace():
                try:
                    found = _parsed(line)
                    texts = [_text(found, name) for name in columns.texts]
                    domain = self.domain if columns.domain is None else _text(found, columns.domain)
                except InputError as error:
                    yield Bad(number, str(error))
                else:
                    yield Record(number, texts, domain)


@dataclass(frozen=True)
class PlainText:
    """A file of plain text, which is one document under every key, and has no other."""

    domain: str
    data: bytes

    unit = "document"

    @property
    def size(self) -> int:
        return len(self.data)

    def records(self, columns: Columns) -> Iterator[Record | Bad]:
        try:
            yield Record(1, [_utf8(self.data)], self.domain)
        except InputError as error:
            yield Bad(1, str(error))


@dataclass(frozen=True)
class Rows:
    """Some rows of a Parquet file: for each of `Columns.names`, the UTF-8 values; None is null."""

    first: int
    domain: str
    values: list[list[bytes | None]]

    unit = "row"

    @property
    def size(self) -> int:
        return sum(len(value or b"") for column in self.values for value in column)

    def records(self, columns: Columns) -> Iterator[Record | Bad]:
        for number, row in enumerate(zip(*self.values, strict=True), start=self.first):
            try:
                found = [
                    _decoded(value, name) for value, name in zip(row, columns.names, strict=True)
                ]
            except InputError as error:
                yield Bad(number, str(error))
            else:
                domain = self.domain if columns.domain is None else found.pop()
                yield Record(number, found, domain)


@dataclass(frozen=True)
class TooLong:
    """A line that is too long to be read into memory."""

    first: int
    domain: str

    unit = "line"
    size = 0

    def records(self, columns: Columns) -> Iterator[Record | Bad]:
        yield Bad(self.first, _TOO_LONG)


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
    text = _value(record, key)
    if not isinstance(text, str):
        raise InputError(f"{type(text).__name__}, not text, under {key!r}")
    # Half of a surrogate pair, which JSON can contain but UTF-8 cannot, becomes "?".
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def _value(record: dict[str, Any], key: str) -> Any:
    """What is under the key, or, under "a.b", what is under b in the object under a."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            known = quoted_names(list(record))
            raise InputError(f"no key {key!r} (its keys: {known}): see --json-keys")
        value = value[part]
    return value


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


def quoted_names(names: Sequence[str]) -> str:
    """Some names for an error message: the first ten, shortened."""
    listed = [repr(name[:40]) for name in names[:10]] + ["..."] * (len(names) > 10)
    return ", ".join(listed) or "none"
