"""A checkpoint that is written while training continues.

The writer is a thread. A forked process could inherit locks that gloo's threads hold, and a spawned
one would take seconds and a second copy of the state. Writing a file, flushing it and computing its
checksum need no interpreter lock, so the thread leaves training its time.

torch's `async_save` writes only the tensors. Here the whole save, with checksums and publication,
is one task of the thread, so that nothing is left to do on the main thread.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moe_parallel.platform.device import device
from moe_parallel.training.checkpoint.snapshot import HostCopy, Snapshot
from moe_parallel.training.checkpoint.writer import NotSaved, Writer


class Background:
    """Writes one checkpoint at a time beside training. All ranks call each method together."""

    def __init__(self, timeout: timedelta) -> None:
        """`timeout`: of the collectives, in which ranks wait for the one that writes longest."""
        # The order of collectives in a group must be the same on all ranks, and that of two
        # threads is not: this thread has a group of its own.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        here = device()
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="checkpoint-writer",
            # torch's writer uses the thread's current GPU, which is the first one at its start.
            initializer=lambda: torch.cuda.set_device(here) if here.type == "cuda" else None,
        )
        self._memory = HostCopy()
        self._pending: tuple[int, Future[Path]] | None = None

    @property
    def pending(self) -> int | None:
        """The iteration whose checkpoint is being written and was not yet asked for by `finish`."""
        return None if self._pending is None else self._pending[0]

    def is_writing(self) -> bool:
        """Whether this rank is still writing. Not collective.

        Raises:
            Exception: an error of this rank alone, for which the other ranks' threads still wait.
        """
        if self._pending is None:
            return False
        _, written = self._pending
        if not written.done():
            return True
        error = written.exception()
        if error is not None and not isinstance(error, NotSaved):
            raise error
        return False

    def begin(self, snapshot: Snapshot, writer: Writer) -> None:
        """Copy the snapshot and begin to write it. On return training may change the state.

        Raises:
            NoMemory: on every rank, if there is no memory for the copy.
        """
        assert self._pending is None, f"iteration {self.pending} is still pending"
        copied = self._memory.copy(snapshot)
        written = self._thread.submit(writer.write, copied, self._group)
        self._pending = snapshot.iteration, written

    def finish(self) -> Path:
        """Wait for the checkpoint that is being written; returns its path.

        Raises:
            NotSaved: as `Writer.write`.
        """
        assert self._pending is not None, "nothing is being written"
        _, written = self._pending
        try:
            return written.result()
        finally:
            self._pending = None
