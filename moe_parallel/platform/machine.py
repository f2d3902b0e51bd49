"""The machine and the software of a run, by which a reader can judge its speed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import psutil  # type: ignore[import-untyped]

PACKAGES = ("torch", "megatron-core", "numpy")


def machine() -> str:
    """Processor, cores, memory and GPUs with their driver, in one line."""
    gibibytes = psutil.virtual_memory().total / 2**30
    parts = [_processor(), f"{len(os.sched_getaffinity(0))} cores", f"{gibibytes:.0f} GiB"]
    return ", ".join([*parts, *_gpus()])


def software(root: Path) -> dict[str, str]:
    """Versions by name, and the commit that is checked out at `root`."""
    versions = {"Python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in PACKAGES}
    commit = _output("git", "-C", str(root), "describe", "--always", "--dirty")
    return versions | ({"commit": commit} if commit else {})


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    """The GPUs that nvidia-smi lists, if it exists."""
    names = _output(
        "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
    ).splitlines()
    return [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
