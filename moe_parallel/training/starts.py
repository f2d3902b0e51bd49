"""starts.jsonl: how a run was started, a JSON object a line for each start or continuation.

time        UTC, ISO 8601
command     as the user typed it; null if a program called `pretrain` itself
directory   in which it was typed
ranks       number of processes
load        --load, or null
versions    of Python, moe-parallel, torch, megatron-core and numpy
platform    operating system and processor
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import moe_parallel

STARTS_FILE = "starts.jsonl"

#: The variable in which the first process of a start hands the command to its ranks.
COMMAND = "MOE_PARALLEL_COMMAND"


def keep_command(script: str, arguments: Sequence[str]) -> None:
    """Keep the command line for the ranks, unless a launcher has kept its own."""
    os.environ.setdefault(COMMAND, shlex.join(["python", script, *arguments]))


def record_start(folder: Path, ranks: int, load: str | None) -> None:
    """Append a line to the folder's starts.jsonl. Raises OSError."""
    with (folder / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(_start(ranks, load)) + "\n")


def _start(ranks: int, load: str | None) -> dict[str, Any]:
    from moe_parallel.platform.machine import PACKAGES  # psutil, which a launcher does not need

    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": os.environ.get(COMMAND),
        "directory": os.getcwd(),
        "ranks": ranks,
        "load": load,
        "versions": {
            "python": platform.python_version(),
            "moe-parallel": moe_parallel.__version__,
            **{name: metadata.version(name) for name in PACKAGES},
        },
        "platform": f"{sys.platform} {platform.machine()}",
    }
