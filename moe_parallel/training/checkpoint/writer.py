"""How a snapshot becomes a published checkpoint, on the main thread or on one during training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from moe_parallel.collective_errors import StorageError, agree, exchange, on_rank_0
from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.files import check_complete, describe_files, list_files
from moe_parallel.training.checkpoint.folder import (
    CheckpointFolder,
    checkpoint_name,
    copy_files,
)
from moe_parallel.training.checkpoint.record import is_whole
from moe_parallel.training.checkpoint.snapshot import Snapshot
from moe_parallel.training.checkpoint.tensors import not_finite, write_tensors
from moe_parallel.training.failure import Diverged


class NotSaved(InputError):
    """A checkpoint could not be written. Training can continue and save later."""


@dataclass(frozen=True)
class Writer:
    """Writes checkpoints to a folder.

    The `group` of a method contains all ranks; None: the default group. A thread during training
    needs a group of its own.
    """

    folder: CheckpointFolder
    files: Mapping[str, str | Path]  # see `copy_files`
    keep_last: int | None  # the number of checkpoints to keep; None keeps all

    def check_finite(self, snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> None:
        """Check every tensor of all ranks, to be called before `write`. Collective.

        Raises:
            Diverged: on every rank, if a value is not finite.
        """
        found = exchange(not_finite(snapshot.shards), group)
        keys = sorted({key for of_rank in found for key in of_rank})
        if keys:
            more = f" and {len(keys) - 1} other tensors" if len(keys) > 1 else ""
            raise Diverged(
                f"iteration {snapshot.iteration}: {keys[0]}{more} of the state to be saved are not "
                f"finite; nothing was saved; {last_good(self.folder, snapshot.iteration)}"
            )

    def write(self, snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> Path:
        """Write a checkpoint and return its path. Collective.

        It is written under a hidden name and renamed when every rank's part is on the disk and
        complete. Until then, and if anything fails, the previous checkpoint stays the latest.

        Raises:
            NotSaved: on every rank, if a rank could not write.
        """
        try:
            return self._write(snapshot, group)
        except StorageError as error:
            self._abandon()
            raise NotSaved(
                f"--save {self.folder.directory}: cannot write the checkpoint of iteration "
                f"{snapshot.iteration}: {error}; {self._what_now()}"
            ) from error
        except Exception:
            self._abandon()
            raise

    def _write(self, snapshot: Snapshot, group: dist.ProcessGroup | None) -> Path:
        iteration = snapshot.iteration
        begun = agree(lambda: self._begin(iteration) if dist.get_rank() == 0 else "", group)
        writing = self.folder.directory / exchange(begun, group)[0]
        write_tensors(snapshot.shards, writing, group)
        on_rank_0(lambda: copy_files(self.files, writing), group)
        names: list[str] = exchange(agree(lambda: list_files(writing), group), group)[0]
        own = names[rank_share()]
        described = exchange(agree(lambda: describe_files(writing, own), group), group)
        files = {name: facts for share in described for name, facts in share.items()}
        on_rank_0(lambda: check_complete(writing, files), group)
        record = dict(snapshot.record)
        if snapshot.adam_step is not None:
            record["adam_step"] = max(exchange(snapshot.adam_step, group))
        record["files"] = files
        on_rank_0(lambda: self.folder.publish(iteration, record, self.keep_last), group)
        return self.folder.published_path(iteration)

    def _begin(self, iteration: int) -> str:
        for source in self._copied:
            source.stat()  # a folder that is gone is not made anew, and says so
        return self.folder.begin(iteration).name

    def _abandon(self) -> None:
        if dist.get_rank() == 0:
            self.folder.tidy()

    def _what_now(self) -> str:
        if not all(source.exists() for source in self._copied):
            return "it, or the whole folder, was renamed or deleted during the run: put it back"
        latest = self.folder.newest_first()[:1]
        kept = f"{latest[0].name} is untouched" if latest else "there was none before"
        return f"{kept}; free the disk or name another folder"

    @property
    def _copied(self) -> list[Path]:
        """The files and folders of the run that every checkpoint has a copy of."""
        return [source for source in self.files.values() if isinstance(source, Path)]


def last_good(folder: CheckpointFolder, iteration: int) -> str:
    """Which checkpoint a run that diverges at `iteration` can continue from, as a message.

    Every checkpoint was finite when it was saved, but that of `iteration` itself led to a
    non-finite value. After each earlier one the run had a finite loss.
    """
    for before in reversed(folder.iterations()):
        path = folder.published_path(before)
        if before < iteration and is_whole(path):
            return f"the last good checkpoint is {path}"
    none = f"there is no good checkpoint in {folder.directory}"
    if is_whole(folder.published_path(iteration)):
        return f"{none}: {checkpoint_name(iteration)} is finite, but no finite loss has followed it"
    return none


def rank_share() -> slice:
    """The part of a checkpoint's files that this rank reads and checks."""
    return slice(dist.get_rank(), None, dist.get_world_size())
