"""What the checkpoints of a run contain, for a user who looks at them, or deletes old ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.digest import checkpoint_digest
from moe_parallel.training.checkpoint.files import check_content
from moe_parallel.training.checkpoint.folder import RECORD, CheckpointFolder
from moe_parallel.training.checkpoint.record import is_whole, read_record
from moe_parallel.training.checkpoint.tensors import stored_tensors
from moe_parallel.training.run_lock import run_lock


def run_checkpoints(run: Path) -> CheckpointFolder:
    """The folder of a run that has checkpoints. Raises InputError if it has none."""
    if not run.is_dir():
        raise InputError(f"{run}: there is no such folder; check the path")
    if (run / RECORD).exists():
        raise InputError(f"{run} is one checkpoint: name the folder of its run, {run.parent}")
    folder = CheckpointFolder(run)
    if not folder.iterations():
        raise InputError(f"{run}: there is no checkpoint; name the folder given to --save")
    return folder


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint as its files on the disk show it, without reading their content."""

    path: Path
    size: int  # bytes
    written: datetime
    is_whole: bool

    @classmethod
    def of(cls, path: Path) -> StoredCheckpoint:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return cls(path, size, datetime.fromtimestamp(path.stat().st_mtime), is_whole(path))


def verify(checkpoint: Path) -> tuple[int, int]:
    """The number of the checkpoint's files, and their bytes. Reads them all.

    Raises InputError if a file is missing or damaged.
    """
    files = read_record(checkpoint)["files"]
    check_content(checkpoint, files, slice(None))
    return len(files), sum(facts["bytes"] for facts in files.values())


def checkpoint_facts(checkpoint: Path, *, digest: bool) -> Iterator[tuple[str, Any]]:
    """What a checkpoint is, by name. `digest`: also the digest of its tensors, which reads all."""
    record = read_record(checkpoint)
    tensors = stored_tensors(checkpoint)
    yield "checkpoint", checkpoint
    for name in ("iteration", "consumed_samples", "consumed_tokens"):
        yield name.replace("_", " "), f"{record['training'][name]:,}"
    layout = " ".join(f"{name} {size}" for name, size in record["layout"].items())
    yield "layout", layout or "none"
    yield "optimizer state", "no, weights only" if record["adam_step"] is None else "yes"
    yield "versions", ", ".join(f"{name} {v}" for name, v in record.get("versions", {}).items())
    yield "tensors", len(tensors)
    yield "size", size_text(sum(file["bytes"] for file in record["files"].values()))
    if digest:
        found = checkpoint_digest(checkpoint)
        yield "digest, weights", found.weights
        yield "digest, optimizer", found.optimizer


def prune(run: Path, keep_last: int) -> list[Path]:
    """Delete all checkpoints but the latest `keep_last`; returns those deleted.

    Raises InputError if a run writes to the folder, if the folder cannot be locked, if the latest
    checkpoint is damaged, or if something cannot be deleted.
    """
    folder = run_checkpoints(run)
    with run_lock(run) as warnings:
        if warnings:  # a run may be writing there, and nothing would tell
            raise InputError(f"{run}: its file system has no locks: delete folders by hand")
        before, latest = folder.paths(), folder.latest()
        if latest not in before or latest.is_symlink() or not is_whole(latest):
            raise InputError(
                f"{run}: the latest checkpoint is damaged, so nothing is deleted; "
                "`verify` says what is whole"
            )
        folder.delete_oldest(folder.iterations()[before.index(latest)], keep_last)
        for path, why in folder.stuck.items():
            raise InputError(f"{path} cannot be deleted ({why}): delete it by hand")
        return sorted(set(before) - set(folder.paths()))


def size_text(amount: int) -> str:
    """A number of bytes for a user."""
    return f"{amount / 2**20:,.1f} MiB" if amount < 2**30 else f"{amount / 2**30:,.1f} GiB"
