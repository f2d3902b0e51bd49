"""The memory that this process can still allocate."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

_CGROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Free bytes on the current CUDA device if there is one, else on this host."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return free_host_memory()


def free_host_memory() -> int:
    """Free bytes on this host, within the limits of this process's control groups."""
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    return min([free, *_left_by_cgroups()])


def peak_host_memory() -> int:
    """The largest resident set of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # the unit of getrusage
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_to_regain() -> int:
    """The bytes of host memory that this process had at its peak and does not have now."""
    return max(0, peak_host_memory() - int(psutil.Process().memory_info().rss))


def memory_owner() -> str:
    """A name of the memory of `free_memory`, equal on processes that share it."""
    if torch.cuda.is_available():  # each process has its own GPU
        return f"{host_memory_owner()} {os.getpid()}"
    return host_memory_owner()


def host_memory_owner() -> str:
    """A name of the memory of `free_host_memory`, equal on processes that share it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.is_file() else ""
    # The ranks of one torchrun share it: containers with their own limits have a torchrun each.
    return f"{host} {os.uname().nodename} {os.environ.get('GROUP_RANK')}"


def _left_by_cgroups(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """The free bytes within each memory limit of this process; file pages count as free."""
    lines = own.read_text().splitlines() if own.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
            base = root / "memory"
        elif controllers == "":
            names, base = ("memory.max", "memory.current", "file"), root
        else:
            continue
        for relative in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents):
            left = _left(base / relative, *names)
            if left is not None:
                yield left


def _left(group: Path, limit_name: str, usage_name: str, pages_name: str) -> int | None:
    """The free bytes of a group; None: it sets no limit or cannot be seen from here."""
    try:
        limit = int((group / limit_name).read_text())
        used = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max" is not a number
        return None
    return max(0, limit - max(0, used - int(stat.get(pages_name, 0))))
