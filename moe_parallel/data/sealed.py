"""Small JSON files that contain their own checksum, and a parser for untrusted JSON.

The checksum shows whether a file was cut, edited or changed by a bit flip. It protects against
accidents. An attacker can compute it, so code that reads these files must check their values.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_parallel.data.atomic_files import write_atomically
from moe_parallel.errors import InputError

_CHECKSUM = "checksum"


def parse_json(data: bytes) -> Any:
    """The value of UTF-8 JSON.

    Raises:
        ValueError: with one line, for any fault: the encoding, the syntax, a number of
            thousands of digits, brackets nested thousands deep.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(file: Path, remedy: str) -> Any:
    """The value of a JSON file that a user names, or that is next to one.

    Raises InputError for a file that cannot be read or is damaged; `remedy` ends that message.
    """
    try:
        return parse_json(file.read_bytes())
    except ValueError as error:
        raise InputError(f"{file} is damaged ({error}){remedy}") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror})") from None


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Publish `content`, JSON values, at `path` with its checksum."""
    write_atomically(path, json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """The content that write_sealed wrote.

    Raises:
        ValueError: the file has changed since it was written; the message is a few words.
        OSError: it cannot be read.
    """
    content = parse_json(path.read_bytes())
    if not isinstance(content, dict) or _CHECKSUM not in content:
        raise ValueError("without a checksum")
    if content.pop(_CHECKSUM) != _checksum(content):
        raise ValueError("changed since it was written")
    return content


def file_digest(path: Path) -> str:
    """Hexadecimal sha256 of a file's content; takes about one second per gigabyte."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
