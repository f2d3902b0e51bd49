"""Small JSON files that contain their own checksum.

The checksum shows whether a file was cut, edited or changed by a bit flip. It protects against
accidents. An attacker can compute it, so code that reads these files must check their values.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_parallel.data.atomic_files import write_atomically
from moe_parallel.reading import open_regular, parse_json, read_small

_CHECKSUM = "checksum"


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Publish `content`, JSON values, at `path` with its checksum."""
    write_atomically(path, json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """The content that write_sealed wrote.

    Raises:
        ValueError: the file has changed since it was written; the message is a few words.
        OSError: it cannot be read.
    """
    content = parse_json(read_small(path))
    if not isinstance(content, dict) or _CHECKSUM not in content:
        raise ValueError("without a checksum")
    if content.pop(_CHECKSUM) != _checksum(content):
        raise ValueError("changed since it was written")
    return content


def file_digest(path: Path) -> str:
    """Hexadecimal sha256 of a file's content; takes about one second per gigabyte."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
