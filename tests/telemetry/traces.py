"""Folders of --moe-router-trace: what is in them, and copies that are changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]


def contents(trace: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in trace.iterdir()}


def change_steps(trace: Path, copy: Path, change: Callable[[Arrays], None]) -> None:
    """Writes a copy with changed arrays in each step."""
    copy.mkdir()
    for path in trace.iterdir():
        arrays = dict(np.load(path))
        change(arrays)
        np.savez(copy / path.name, **arrays)  # type: ignore[arg-type]
