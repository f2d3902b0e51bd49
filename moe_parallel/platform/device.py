"""The device and the communication backend with which this host trains, and its memory."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from moe_parallel.errors import InputError

_CGROUPS = Path("/sys/fs/cgroup")
#: M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_OWN_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def device() -> torch.device:
    """The current CUDA device if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def take_gpu(local_rank: int) -> None:
    """Use the GPU with this process's local rank. Raises InputError if the node has too few."""
    if local_rank >= torch.cuda.device_count():
        raise InputError(
            f"this node has {torch.cuda.device_count()} GPUs, and process {local_rank + 1} finds "
            "none left: start at most as many (--nproc-per-node)"
        )
    torch.cuda.set_device(local_rank)


def multiplies_bf16(x: torch.Tensor) -> bool:
    """Whether the device of x has instructions for products in bf16; without them they are slow."""
    return x.is_cuda or torch.cpu._is_avx512_bf16_supported()


def fast_factors(*factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The factors of a product, all of one dtype, in one that the device multiplies fast.

    This is fp32 instead of bf16 where `multiplies_bf16` is false, and otherwise their own.
    """
    if factors[0].dtype == torch.bfloat16 and not multiplies_bf16(factors[0]):
        return tuple(factor.float() for factor in factors)
    return factors


def peak_memory() -> int:
    """The most memory that this process has used at once, in bytes.

    This counts tensors on the current CUDA device if there is one, else the resident set.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return peak_host_memory()


def default_backend() -> str:
    """'nccl' if CUDA is available, else 'gloo'."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def choose_backend(requested: str | None) -> str:
    """The value of --distributed-backend; None selects the default of this host.

    Raises:
        InputError: nccl on a host without CUDA.
    """
    backend = requested or default_backend()
    if backend == "nccl" and not torch.cuda.is_available():
        raise InputError(
            "--distributed-backend nccl needs CUDA, which this host does not have: "
            "use --distributed-backend gloo"
        )
    return backend


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
