"""A log on disk that grows by whole entries, whatever the disk says."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path


class Journal:
    """Appends entries to a file, each whole or not at all.

    What the disk refuses (it is full, over quota, or gone) is taken off again, kept in memory and
    tried once more with the next entry: no half entry ever stands before a whole one. At most the
    `KEPT` latest entries wait like this.
    """

    KEPT = 1000

    def __init__(self, path: Path) -> None:
        """Makes the file if need be. Raises OSError."""
        self._file = path.open("ab", buffering=0)
        self._end = path.stat().st_size  # of the last whole entry
        self._torn = False  # whether something stands behind that
        self._waiting: deque[bytes] = deque(maxlen=self.KEPT)

    def append(self, entry: bytes) -> None:
        """The entry is with the operating system on return. Raises OSError if it waits instead."""
        self._waiting.append(entry)
        self._write()

    def sync(self) -> None:
        """Wait until everything is on the disk. Raises OSError."""
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Raises OSError if entries are lost."""
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        self._mend()
        while self._waiting:
            self._torn = True  # until it is whole: Ctrl-C, too, may come in the middle
            try:
                self._write_whole(self._waiting[0])
            except OSError:
                with contextlib.suppress(OSError):  # else with the next entry
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
