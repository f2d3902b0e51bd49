"""`PREFIX.manifest.json`, next to .bin and .idx: what an indexed dataset was when it was written.

The same documents from the same files give the same manifest. Datasets that Megatron's own tools
wrote have none and are used unchecked.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_parallel.data.sealed import read_sealed, write_sealed
from moe_parallel.errors import InputError

_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of text that the documents came from: its path when read, size and SHA-256."""

    path: str
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Size:
    """The numbers of documents and tokens of a domain."""

    documents: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content and origin of PREFIX.bin and PREFIX.idx.

    Attributes:
        documents, tokens: numbers of these in the dataset.
        bin_sha256, idx_sha256: of the files.
        tokenizer: fingerprint of the tokenizer that produced the ids; None: unknown.
        seq_length: the --seq-length for which the documents were cut; None: any.
        sources: the files of text, in the order in which they were read; None: unknown.
        domains: the size of each domain; they add up to the dataset. None: unknown.
    """

    documents: int
    tokens: int
    bin_sha256: str
    idx_sha256: str
    tokenizer: str | None
    seq_length: int | None
    sources: tuple[SourceFile, ...] | None = None
    domains: Mapping[str, Size] | None = None


# Fields that manifests of format 1, of earlier versions, did not have.
_NEW_IN_2 = ("sources", "domains")


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
    found = content.pop("format", None)
    if found == 1 and not content.keys() & set(_NEW_IN_2):
        content |= dict.fromkeys(_NEW_IN_2)
    elif found != _FORMAT:
        raise InputError(f"{wrong} is not of format {_FORMAT}, which this program reads; {remedy}")
    try:
        return _parsed(content)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(
            f"{wrong} is not of format {found}: a field is missing, new or of another type; "
            f"{remedy}"
        ) from None


def _parsed(content: dict[str, Any]) -> Manifest:
    """The manifest that `write_manifest` wrote. Raises ValueError or TypeError for another."""
    sources, domains = content.pop("sources"), content.pop("domains")
    if sources is not None:
        sources = tuple(_checked(SourceFile(**each)) for each in sources)
    if domains is not None:
        domains = {name: _checked(Size(**each)) for name, each in domains.items()}
    manifest = Manifest(**content)
    for name, kind in Manifest.__annotations__.items():
        if name not in _NEW_IN_2 and not isinstance(getattr(manifest, name), kind):
            raise TypeError(name)
    manifest = dataclasses.replace(manifest, sources=sources, domains=domains)
    if domains is not None:
        whole = [(size.documents, size.tokens) for size in domains.values()]
        if (manifest.documents, manifest.tokens) != tuple(map(sum, zip(*whole, strict=True))):
            raise ValueError("the domains do not add up")
    return manifest


def _checked(record: Any) -> Any:
    for name, kind in type(record).__annotations__.items():
        if not isinstance(getattr(record, name), kind):
            raise TypeError(name)
    return record
