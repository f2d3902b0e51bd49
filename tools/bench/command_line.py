"""What the benchmarks' command lines and their first lines share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moe_parallel.errors import InputError


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def chosen(flag: str, words: list[str] | None, known: list[str], default: list[str]) -> list[str]:
    """The words, in the order of `known`."""
    for word in words or ():
        if word not in known:
            raise InputError(f"{flag} {word!r} is unknown: choose of {', '.join(known)}")
    return default if words is None else [word for word in known if word in words]


def check_writable(path: Path | None) -> None:
    """Check before the long measurement that the file can be written."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"--json {path} is a folder: name a file")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise InputError(f"--json {path} cannot be written there: name another file")


def print_about(facts: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in facts["software"].items())
    print(f"{facts['command']}   ({facts['date']})")
    print(f"machine   {facts['machine']}, {facts['instructions']}")
    print(f"software  {versions}")
    print(f"threads   {facts['threads']}, load {load_of(facts['load_before'])} before", flush=True)


def load_of(averages: tuple[float, float, float]) -> str:
    return ", ".join(f"{average:.2f}" for average in averages)
