"""SIGBUS: a page of a memory-mapped file cannot be read or written, because the file was cut, or
its disk is full or gone.

The kernel sends the signal to the thread that touched the page. Python's own handlers run later,
between two instructions of the interpreter, which that thread never reaches. So the handler here
is one of C's, made by ctypes. It finds the file of the address in /proc/self/maps.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

_SA_SIGINFO, _SA_RESETHAND, _SA_NODEFER = 0x4, 0x80000000, 0x40000000
_ADDRESS = 16  # offset of si_addr in siginfo_t, bytes
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_kept: list[object] = []  # handlers that the kernel may call


class _Action(ctypes.Structure):
    """glibc's `struct sigaction` on 64-bit Linux."""

    _fields_ = (
        ("handler", _HANDLER),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def on_bus_error(end: Callable[[str], object]) -> None:
    """Call `end` with one line that names the file when a page of a mapped file is lost.

    `end` must end the process. If the address belongs to no file, or `end` fails, SIGBUS kills the
    process as it does without a handler. Systems other than Linux are left as they are.
    """
    if sys.platform != "linux":
        return

    def handle(number: int, info: int, context: int) -> None:
        address = ctypes.c_void_p.from_address(info + _ADDRESS).value
        path = file_at(address or 0, Path("/proc/self/maps").read_text().splitlines())
        if path is not None:
            end(
                f"{path} cannot be read or written (SIGBUS): the file was cut while it was in "
                "use, or its disk is full or gone; restore it, then start the same command again"
            )

    action = _Action(
        handler=_HANDLER(handle),
        # A second SIGBUS, or one for which `end` was not called, kills the process.
        flags=ctypes.c_int(_SA_SIGINFO | _SA_RESETHAND | _SA_NODEFER).value,
    )
    _kept.append(action)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaction(int(signal.SIGBUS), ctypes.byref(action), None) != 0:
        raise OSError(ctypes.get_errno(), "sigaction")


def file_at(address: int, maps: Iterable[str]) -> str | None:
    """The file that is mapped at an address, from the lines of /proc/PID/maps; None: no file."""
    for line in maps:
        span, _, rest = line.partition(" ")
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            words = rest.split(maxsplit=4)  # permissions, offset, device, inode, path
            path = words[4] if len(words) == 5 else ""
            return path if path.startswith("/") else None
    return None
