"""Facts that a reader needs to judge a measurement."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_parallel.platform.machine import machine, software

ROOT = Path(__file__).resolve().parents[2]


def about(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The command, when and where it runs, and the load of the machine, as JSON values."""
    return {
        "command": " ".join([f"python tools/bench/{program}", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "software": software(ROOT),
        "load_before": os.getloadavg(),
    }
