"""A checkpoint that is written while training continues.

The writer is a thread. A forked process could inherit locks that gloo's threads hold, and a spawned
one would take seconds and a second copy of the state. Writing a file, flushing it and computing its
checksum need no interpreter lock, so the thread leaves training its time.

torch's `async_save` writes only the tensors. Here the thread does all of a save: the copy, the
search for values that are not finite, the files, their checksums, the publication. The copy of the
weights and of the optimizer's state is made during the next forward and backward pass, which do not
change them; only the update waits for it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moe_parallel.platform.device import device
from moe_parallel.training.checkpoint.snapshot import HostCopy, Snapshot, with_own_buffers
from moe_parallel.training.checkpoint.writer import NotSaved, Writer
from moe_parallel.training.failure import Diverged

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
        self._memory.check_memory(snapshot.shards)
        started = replace(snapshot, shards=with_own_buffers(snapshot.shards))
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
            return replace(snapshot, shards=self._memory.copy(snapshot.shards))


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being copied or written."""

    iteration: int
    copied: Future[Snapshot]
    written: Future[Path]
