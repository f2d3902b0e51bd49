"""The files of a checkpoint, and the size and CRC-32 of each, which its record contains."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from moe_parallel.collective_errors import StorageError
from moe_parallel.errors import Damaged
from moe_parallel.reading import open_regular
from moe_parallel.training.checkpoint.folder import RECORD, other_checkpoints
from moe_parallel.training.checkpoint.index import TENSOR_INDEX, data_files, read_index
from moe_parallel.training.checkpoint.tensors import COMMON

Files: TypeAlias = Mapping[str, Mapping[str, int]]  # by path in the checkpoint: bytes, crc32


def list_files(folder: Path) -> list[str]:
    """Every file of a checkpoint except its record, by its path in the checkpoint, sorted."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Size and CRC-32 of files.

    Reading takes about one second per gigabyte, so each rank reads a share.
    """
    return {
        name: {"bytes": (folder / name).stat().st_size, "crc32": _crc32(folder / name)}
        for name in names
    }


def check_complete(folder: Path, files: Files) -> None:
    """Check that the described `files` are a complete checkpoint and still exist.

    Raises:
        StorageError: another process removed a file, or ranks wrote to different folders.
    """
    needed = {TENSOR_INDEX: 0, COMMON: 0}
    if TENSOR_INDEX in files:
        needed |= data_files(read_index(folder))
    for name, size in needed.items():
        if name not in files:
            raise StorageError(f"{name} is missing: every rank has to write into the same folder")
        if files[name]["bytes"] < size:
            raise StorageError(f"{name} has {files[name]['bytes']} bytes instead of {size}")
    for name, facts in files.items():
        if (folder / name).stat().st_size != facts["bytes"]:
            raise StorageError(f"{name} has changed since it was written")


def check_sizes(checkpoint: Path, files: Files) -> None:
    """Check that every file exists in its full size; raises Damaged."""
    for name, facts in files.items():
        path = checkpoint / name
        if not os.path.isfile(path):  # also for a name that is too long
            raise torn(checkpoint, f"{name[:200]} is missing")
        if path.stat().st_size != facts["bytes"]:
            size = path.stat().st_size
            raise torn(checkpoint, f"{name} has {size} bytes instead of {facts['bytes']}")


def check_content(checkpoint: Path, files: Files, share: slice) -> None:
    """Read a share of the files and compare them with the record; raises Damaged."""
    for name, facts in describe_files(checkpoint, sorted(files)[share]).items():
        if files[name] != facts:
            raise torn(checkpoint, f"{name} is damaged")


def torn(checkpoint: Path, what: str) -> Damaged:
    """The error of a checkpoint that differs from what was saved."""
    others = other_checkpoints(checkpoint)
    remedy = f"load another one: {others}" if others else "it cannot be loaded"
    return Damaged(
        f"--load {checkpoint}: the checkpoint is incomplete or damaged: {what}; {remedy}"
    )


def _crc32(path: Path) -> int:
    crc = 0
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
