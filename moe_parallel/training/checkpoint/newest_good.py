"""The newest checkpoint of a run that is what was saved.

Whatever has a checkpoint's name was complete when it got it. Later a disk can damage it, or someone
copies a folder in part, or renames it. A run that continues in its own folder, as a requeued job
does, then takes the checkpoint before. A user who names one checkpoint gets that one or an error.
"""

from __future__ import annotations

from pathlib import Path

from moe_parallel.collective_errors import StorageError, agree
from moe_parallel.errors import Damaged, InputError
from moe_parallel.training.checkpoint.files import check_content
from moe_parallel.training.checkpoint.folder import CheckpointFolder
from moe_parallel.training.checkpoint.record import read_record
from moe_parallel.training.checkpoint.writer import rank_share


def newest_good(folder: Path) -> tuple[Path, str | None]:
    """The newest checkpoint in a run folder whose files are all unchanged. Collective.

    Every file of it is read, each rank reads a share. Returns the checkpoint and, if it is not the
    newest of all, or the tracker is damaged, what is wrong.

    Raises:
        InputError: on every rank, with the first error, if no checkpoint is good; or if a
            file cannot be read.
    """
    checkpoints = CheckpointFolder(folder)
    first: Damaged | None = None
    try:
        agree(checkpoints.latest)
    except Damaged as error:
        first = error
    for checkpoint in agree(checkpoints.newest_first):
        try:
            _check(checkpoint)
        except Damaged as error:
            first = first or error
        except StorageError as error:  # it may be good, and readable at the next start
            raise InputError(
                f"--load {checkpoint} cannot be read: {error}; check the disk"
            ) from error
        else:
            wrong = None if first is None else str(first).rpartition("; ")[0]
            return checkpoint, wrong
    raise first or InputError(f"--load {folder}: no checkpoint here; remove --load to start anew")


def _check(checkpoint: Path) -> None:
    record = agree(lambda: read_record(checkpoint))
    agree(lambda: check_content(checkpoint, record["files"], rank_share()))
