"""Another host at another time, for a program with this folder in PYTHONPATH.

Python imports a module of this name when it starts. The clock is 400 days ahead, the host has
another name, and folders list their files in another order.
"""

import os
import socket
import time
from typing import Any

AHEAD = 400 * 86_400  # seconds

_time, _listdir, _scandir = time.time, os.listdir, os.scandir


class _Scan:
    """What os.scandir returns, in the reverse order of names."""

    def __init__(self, path: Any) -> None:
        with _scandir(path) as entries:
            self._entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

    def __iter__(self) -> "_Scan":
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "_Scan":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _reversed(path: Any = ".") -> list[Any]:
    return sorted(_listdir(path), reverse=True)


time.time = lambda: _time() + AHEAD
socket.gethostname = lambda: "another-host"
os.listdir = _reversed  # type: ignore[assignment]
os.scandir = _Scan  # type: ignore[assignment, misc]
