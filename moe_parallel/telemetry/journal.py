"""A log on disk to which only complete entries are appended, even if writing fails."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path


class Journal:
    """Appends entries to a file, each completely or not at all.

    If a write fails (the disk is full, over quota, or gone), the partial entry is removed, kept in
    memory and written again with the next entry. So an incomplete entry never precedes a complete
    one. At most the `KEPT` latest entries wait in memory.
    """

    KEPT = 1000

    def __init__(self, path: Path) -> None:
        """Creates the file if necessary. Raises OSError."""
        self._file = path.open("ab", buffering=0)
        self._end = path.stat().st_size  # the end of the last complete entry
        self._torn = False  # whether a partial entry follows it
        self._waiting: deque[bytes] = deque(maxlen=self.KEPT)

    def append(self, entry: bytes) -> None:
        """On return the operating system has the entry. Raises OSError if it waits instead."""
        self._waiting.append(entry)
        self._write()

    def sync(self) -> None:
        """Wait until everything is on the disk. Raises OSError."""
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. Raises OSError if entries are lost."""
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        self._mend()
        while self._waiting:
            self._torn = True  # until the write is complete: Ctrl-C may interrupt it, too
            try:
                self._write_whole(self._waiting[0])
            except OSError:
                with contextlib.suppress(OSError):  # if this fails, the next entry does it
                    self._mend()
                raise
            self._torn = False
            self._end += len(self._waiting.popleft())

    def _write_whole(self, entry: bytes) -> None:
        rest = memoryview(entry)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _mend(self) -> None:
        if self._torn:
            self._file.truncate(self._end)
            self._torn = False
