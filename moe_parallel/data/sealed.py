"""Small JSON files that carry a checksum of themselves, and JSON that comes from anywhere.

A file that was cut, edited or hit by a bit flip is told from one that is as it was written. The
checksum guards against accidents: who means harm can compute it, so nothing here is believed
further than what its reader checks.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_parallel.data.atomic_files import write_atomically

_CHECKSUM = "checksum"


def parse_json(data: bytes) -> Any:
    """The value that UTF-8 JSON spells.

    Raises:
        ValueError: of one line, whatever is wrong: the encoding, the syntax, a number of
            thousands of digits, brackets nested thousands deep.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Publish `content`, JSON values, under `path` with its checksum."""
    write_atomically(path, json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """What write_sealed wrote.

    Raises:
        ValueError: the file is not as it was written; a reason of a few words.
        OSError: it cannot be read.
    """
    content = parse_json(path.read_bytes())
    if not isinstance(content, dict) or _CHECKSUM not in content:
        raise ValueError("without a checksum")
    if content.pop(_CHECKSUM) != _checksum(content):
        raise ValueError("changed since it was written")
    return content


def file_digest(path: Path) -> str:
    """Hexadecimal sha256 of a file's content: about a second a gigabyte."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
