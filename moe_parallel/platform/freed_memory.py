"""Whether glibc keeps the memory that tensors on a CPU have freed, as torch does on a GPU."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's malloc.h
_OWN_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next allocation, in this process.

    Otherwise every tensor beyond 32 MiB is new memory, and the page faults of its first use can
    take longer than the operator that writes it. Returns False if the C library has no such
    setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))  # -1: never trim


def keep_freed_memory_unless_set() -> None:
    """The same, unless the environment says what glibc does with freed memory."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc." not in tunables and not any(name in os.environ for name in _OWN_SETTINGS):
        keep_freed_memory()
