"""Documents from JSON lines: one object per line, with the text under a key."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from moe_parallel.errors import InputError


def read_jsonl(
    path: Path,
    key: str,
    advance: Callable[[int], object] = lambda count: None,
    check: Callable[[str], object] = lambda text: None,
) -> Iterator[str]:
    """Yield the text under `key` of every line, one line at a time; empty lines are skipped.

    Half of a surrogate pair, which JSON can contain but UTF-8 cannot, becomes "?".

    Args:
        path: the file, UTF-8.
        key: of the text in each object.
        advance: called with the number of bytes read, for a progress bar.
        check: called with each text; raises InputError for one that cannot be used.

    Raises:
        InputError: the file cannot be read, a line is not an object with a text under `key`,
            or the text is refused; the message gives the number of the line.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise InputError(f"--input {path} cannot be read ({error.strerror})") from None
    with stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                where = f"--input {path} line {number}"
                text = _text_of(line.rstrip(), key, where)
                try:
                    check(text)
                except InputError as error:
                    raise InputError(f"{where}: {error}") from None
                yield text
            advance(len(line))


def _text_of(line: bytes, key: str, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 (byte {error.start + 1}): convert it") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error.msg}, column {error.colno})") from None
    except ValueError:  # a number of thousands of digits
        raise InputError(f"{where} holds a number of too many digits") from None
    except RecursionError:
        raise InputError(f"{where} is nested too deep") from None
    if not isinstance(record, dict):
        raise InputError(f"{where} is not a JSON object: one {{...}} a line is expected")
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise InputError(f"{where} has no key {key!r} (its keys: {keys}): see --json-keys")
    text = record[key]
    if not isinstance(text, str):
        raise InputError(f"{where} holds a {type(text).__name__} under {key!r}, not a text")
    return text.encode("utf-8", errors="replace").decode("utf-8")
