"""Reads files that somebody else may have made, in bounded time and memory.

A pipe, a device, a file or a line without end, values nested without end and numbers that no float
holds are refused in a few words, so that code behind a reader meets none of them.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from moe_parallel.errors import InputError

#: The most bytes of a file that is read whole, and of a line.
MOST_BYTES = 64 << 20
#: The most bytes of the texts in the rows of Parquet that are read at a time, if there are several.
MOST_OF_ROWS = 256 << 20
_MOST_LEVELS = 100
_LARGEST = sys.float_info.max


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file to read. Raises OSError, also for a pipe or a device, which may have no end.

    A pipe that the shell hands over, by `<(...)` or `|` and /dev/stdin, is opened once.
    """
    # Without O_NONBLOCK, opening a pipe waits for its writer.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    mode, reason = os.fstat(file.fileno()).st_mode, "it is not a regular file"
    if stat.S_ISFIFO(mode) and str(path).startswith(("/dev/fd/", "/dev/stdin")):
        os.set_blocking(file.fileno(), True)
        mode, reason = stat.S_IFREG, "it is a pipe, and was read before: name a file"
        if not file.peek(1):
            mode = stat.S_IFIFO
    if not stat.S_ISREG(mode):
        file.close()
        raise OSError(errno.EINVAL, reason, str(path))
    return file


def read_small(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file. Raises OSError, and ValueError if it has more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"larger than {most >> 20} MiB")
    return content


def read_word(path: Path) -> str:
    """The first 100 bytes of a file that holds no more than a word. Raises OSError."""
    with open_regular(path) as file:
        return file.read(100).decode("utf-8", "backslashreplace").strip()


def read_end(path: Path) -> str:
    """The last 64 KiB of a log. Raises OSError."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - (64 << 10)))
        return file.read(64 << 10).decode("utf-8", "replace")


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, with their ends. Raises OSError, and InputError for one too long."""
    with open_regular(path) as file:
        while line := file.readline(MOST_BYTES + 1):
            if len(line) > MOST_BYTES:
                raise InputError(f"{path}: a line is longer than {MOST_BYTES >> 20} MiB: delete it")
            yield line


def parse_json(data: bytes) -> Any:
    """The value of UTF-8 JSON. Raises ValueError, with one line, for any fault and any excess."""
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value]
    for _ in range(_MOST_LEVELS):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, int | float) and not -_LARGEST <= each <= _LARGEST:
                raise ValueError("a number is not finite, or has too many digits")
        if not inner:
            return value
        level = inner
    raise ValueError("nested too deeply")


def read_json(file: Path, remedy: str) -> Any:
    """The value of a JSON file that a user names, or that is next to one.

    Raises InputError for a file that cannot be read or is damaged; `remedy` ends that message.
    """
    try:
        return parse_json(read_small(file))
    except ValueError as error:
        raise InputError(f"{file} is damaged ({error}){remedy}") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror})") from None


def first_line(error: BaseException) -> str:
    """The first line of a library's error message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def rows_at_a_time(metadata: Any) -> int:
    """How many rows of a Parquet file to read at a time, for `ParquetFile.iter_batches`.

    A file may hold a text once, and thousands of rows may be that text. None is longer than the
    part of the column in its row group. Of a file whose footer lies about that size, no more than
    64 are read, of which the cost is small.
    """
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    parts = (group.column(i) for group in groups for i in range(group.num_columns))
    texts = (part.total_uncompressed_size for part in parts if "BYTE_ARRAY" in part.physical_type)
    return max(1, min(64, MOST_OF_ROWS // max((1, *texts))))
