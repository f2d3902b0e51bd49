"""Deletes old checkpoints of a run that has ended."""

from __future__ import annotations

from pathlib import Path

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.inventory import run_checkpoints
from moe_parallel.training.checkpoint.record import is_whole
from moe_parallel.training.run_lock import run_lock


def prune(run: Path, keep_last: int) -> list[Path]:
    """Delete all checkpoints but the latest `keep_last`; returns those deleted.

    Raises InputError if a run writes to the folder, if the folder cannot be locked, or if the
    latest checkpoint is damaged.
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
        return sorted(set(before) - set(folder.paths()))
