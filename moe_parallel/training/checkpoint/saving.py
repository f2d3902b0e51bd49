"""How the state of a run becomes a published checkpoint, also while training continues.

A snapshot refers to the tensors of the model and the optimizer, which training changes. A `Writer`
writes and publishes it, on the main thread or, for `Background`, on another.

The background writer is a thread. A forked process could inherit locks that gloo's threads hold,
and a spawned one would take seconds and a second copy of the state. The thread does all of a save:
the copy, the search for values that are not finite, the files, their checksums, the publication;
torch's `async_save` would write only the tensors. The copy is made during the next forward and
backward pass, which do not change weights and optimizer state; only the update waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from moe_parallel.collective_errors import StorageError, agree, exchange, on_rank_0
from moe_parallel.errors import InputError
from moe_parallel.platform.device import (
    device,
    free_host_memory,
    host_memory_owner,
    memory_to_regain,
)
from moe_parallel.training.checkpoint.folder import (
    CheckpointFolder,
    checkpoint_name,
    copy_files,
)
from moe_parallel.training.checkpoint.optimizer import STATE_PREFIX
from moe_parallel.training.checkpoint.record import (
    check_complete,
    describe_files,
    is_whole,
    list_files,
    rank_share,
)
from moe_parallel.training.checkpoint.tensors import Sharded, not_finite, write_tensors
from moe_parallel.training.failure import Diverged


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of a checkpoint that is to be written."""

    iteration: int
    values: list[Sharded]  # of this rank, also those that another one writes
    adam_step: int | None  # 0: this rank updates nothing; None: there is no optimizer
    record: dict[str, Any]  # the fields of checkpoint.json, see record.py, except the files


class NoMemory(Exception):
    """The host has too little memory for a copy of the state. The message is one line."""


class HostCopy:
    """The memory of a host for a copy of what this rank writes.

    It is kept between copies: allocating it takes longer than copying, and no later copy can then
    run out of memory. With a GPU it is pinned, and is written on a stream of its own, during the
    computation. A new copy overwrites the one before.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def check_memory(self, values: list[Sharded]) -> None:
        """Check that the ranks of each host can copy what they write. Collective.

        Raises:
            NoMemory: on every rank, if a host has too little memory.
        """
        needed = max(0, _bytes_copied_later(values) - len(self._memory))
        if needed:  # the next step allocates again what the last one has released
            needed += memory_to_regain()
        ranks = exchange((host_memory_owner(), needed, free_host_memory()))
        for owner in dict.fromkeys(owner for owner, _, _ in ranks):
            total = sum(need for other, need, _ in ranks if other == owner)
            free = min(free for other, _, free in ranks if other == owner)
            if total > free:
                raise NoMemory(
                    f"a copy of the state during training takes {total / 2**30:,.1f} GiB of host "
                    f"memory, and {free / 2**30:,.1f} GiB are free"
                )

    def copy(self, values: list[Sharded]) -> list[Sharded]:
        """The values, with copies of the weights and of the optimizer's state."""
        size = _bytes_copied_later(values)
        if size > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8)  # releases the smaller one
            self._memory = torch.empty(size, dtype=torch.uint8)
            if self._stream is not None:
                _pin(self._memory)
        copied, used = [], 0
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # None: nothing changes
            for each in values:
                if _is_copied_later(each):
                    here = self._memory[used : used + each.data.nbytes]
                    used += _padded(each.data.nbytes)
                    here = here.view(each.data.dtype).view(each.data.shape)
                    each = replace(each, data=here.copy_(each.data.detach(), non_blocking=True))
                copied.append(each)
        if self._stream is not None:
            self._stream.synchronize()
        return copied


def _bytes_copied_later(values: list[Sharded]) -> int:
    return sum(_padded(each.data.nbytes) for each in values if _is_copied_later(each))


def _padded(size: int) -> int:
    """Rounded up to a place at which a value of any dtype of weights can begin."""
    return -(-size // 4) * 4


def _pin(memory: torch.Tensor) -> None:
    """Pin memory in place. torch's own pinned memory has the size of the next power of two."""
    pin_memory(memory.data_ptr(), len(memory))
    end = weakref.finalize(memory.untyped_storage(), unpin_memory, memory.data_ptr())
    end.atexit = False  # the process ends, and CUDA may be gone


def with_own_buffers(values: list[Sharded]) -> list[Sharded]:
    """The values, with copies of buffers and objects, which a forward pass may change; small."""
    own = []
    for each in values:
        if is_main_replica(each.replica_id) and not _is_copied_later(each):
            data, is_tensor = each.data, isinstance(each, ShardedTensor)
            data = data.detach().to("cpu", copy=True) if is_tensor else deepcopy(data)
            each = replace(each, data=data)
        own.append(each)
    return own


def _is_copied_later(value: Sharded) -> bool:
    """Whether this rank writes it, and only an optimizer step changes it: a weight, or a part of
    the optimizer's state."""
    return (
        isinstance(value, ShardedTensor)
        and is_main_replica(value.replica_id)
        and (value.data.requires_grad or value.key.startswith(STATE_PREFIX))
    )


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
        found = exchange(not_finite(snapshot.values), group)
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
        iteration, is_first = snapshot.iteration, dist.get_rank() == 0
        try:
            begun = agree(lambda: self.folder.begin(iteration).name if is_first else "", group)
            writing = self.folder.directory / exchange(begun, group)[0]
            on_rank_0(lambda: copy_files(self.files, writing), group)
            write_tensors(snapshot.values, writing, group)
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
        except Exception as error:
            if is_first:
                self.folder.tidy()
            if not isinstance(error, StorageError):
                raise
            latest = self.folder.newest_first()[:1]
            kept = f"{latest[0].name} is untouched" if latest else "there was none before"
            raise NotSaved(
                f"--save {self.folder.directory}: cannot write the checkpoint of iteration "
                f"{iteration}: {error}; {kept}; free the disk or name another folder"
            ) from error
        return self.folder.published_path(iteration)


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


WRITER = "checkpoint-writer"  # begins the name of the thread


class Background:
    """Writes one checkpoint at a time during training. All ranks call each method together."""

    def __init__(self, timeout: timedelta) -> None:
        """`timeout`: of the collectives, in which ranks wait for the one that writes longest."""
        # The order of collectives in a group must be the same on all ranks, and that of two
        # threads is not: this thread has a group of its own.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        here = device()
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=WRITER,
            # torch's writer uses the thread's current GPU, which is the first one at its start.
            initializer=lambda: torch.cuda.set_device(here) if here.type == "cuda" else None,
        )
        self._memory = HostCopy()
        self._pending: _Pending | None = None

    @property
    def pending(self) -> int | None:
        """The iteration whose checkpoint is being written and was not yet asked for by `finish`."""
        return None if self._pending is None else self._pending.iteration

    def is_writing(self) -> bool:
        """Whether this rank is still writing. Not collective.

        Raises:
            Exception: an error of this rank alone, for which the other ranks' threads still wait.
        """
        if self._pending is None:
            return False
        if not self._pending.written.done():
            return True
        error = self._pending.written.exception()
        if error is not None and not isinstance(error, NotSaved | Diverged):
            raise error
        return False

    def begin(self, snapshot: Snapshot, writer: Writer) -> None:
        """Begin to copy and to write a snapshot.

        Raises:
            NoMemory: on every rank, if there is no memory for the copy.
        """
        assert self._pending is None, f"iteration {self.pending} is still pending"
        self._memory.check_memory(snapshot.values)
        started = replace(snapshot, values=with_own_buffers(snapshot.values))
        # The stream in whose order the weights change, which is not always the default one.
        stream = torch.cuda.current_stream() if device().type == "cuda" else None
        copied = self._thread.submit(self._copy, started, writer, stream)
        written = self._thread.submit(lambda: writer.write(copied.result(), self._group))
        self._pending = _Pending(snapshot.iteration, copied, written)

    def wait_for_copy(self) -> None:
        """Wait until the weights and the optimizer's state may change.

        Raises:
            Diverged: on every rank, if a value to be saved is not finite.
        """
        if self._pending is not None:
            self._pending.copied.result()

    def finish(self) -> Path:
        """Wait for the checkpoint that is being written; returns its path.

        Raises:
            NotSaved: on every rank, if a rank could not write.
            Diverged: as `wait_for_copy`.
        """
        assert self._pending is not None, "nothing is being written"
        try:
            return self._pending.written.result()
        finally:
            self._pending = None

    def _copy(
        self, snapshot: Snapshot, writer: Writer, stream: torch.cuda.Stream | None
    ) -> Snapshot:
        with torch.cuda.stream(stream):
            writer.check_finite(snapshot, self._group)
            return replace(snapshot, values=self._memory.copy(snapshot.values))


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being copied or written."""

    iteration: int
    copied: Future[Snapshot]
    written: Future[Path]
