"""`PREFIX.manifest.json`, a record of an indexed dataset when it was written, beside .bin and .idx.

The same documents give the same manifest. Datasets that Megatron's own tools wrote have none and
are used unchecked.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from moe_parallel.data.sealed import read_sealed, write_sealed
from moe_parallel.errors import InputError

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content and origin of PREFIX.bin and PREFIX.idx.

    Attributes:
        documents, tokens: numbers of these in the dataset.
        bin_sha256, idx_sha256: of the files.
        tokenizer: fingerprint of the tokenizer that produced the ids; None: unknown.
        seq_length: the --seq-length for which the documents were cut; None: any.
    """

    documents: int
    tokens: int
    bin_sha256: str
    idx_sha256: str
    tokenizer: str | None
    seq_length: int | None


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.manifest.json")  # not with_suffix: a prefix may contain dots


def write_manifest(prefix: str | Path, manifest: Manifest) -> None:
    write_sealed(manifest_path(prefix), {"format": _FORMAT, **dataclasses.asdict(manifest)})


def read_manifest(prefix: str | Path) -> Manifest | None:
    """The manifest of a dataset; None if it has none.

    Raises:
        InputError: a manifest that is damaged, or of another format.
    """
    path = manifest_path(prefix)
    if not os.path.lexists(path):
        return None
    wrong = f"--data-path {prefix}: {path}"
    remedy = "restore it, or delete it to use the dataset unchecked"
    try:
        content = read_sealed(path)
    except ValueError as error:
        raise InputError(f"{wrong} is damaged ({error}); {remedy}") from None
    except OSError as error:
        raise InputError(f"{wrong} cannot be read ({error.strerror}); {remedy}") from None
    if content.pop("format", None) != _FORMAT or not _fits(content):
        raise InputError(f"{wrong} is not of format {_FORMAT}, which this program reads; {remedy}")
    return Manifest(**content)


def _fits(content: dict[str, Any]) -> bool:
    """Whether a manifest has every field, with the right type."""
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Manifest)}
    return content.keys() == kinds.keys() and all(
        isinstance(value, kinds[name]) for name, value in content.items()
    )
