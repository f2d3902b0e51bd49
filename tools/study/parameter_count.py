"""The number of parameters of a contender, as tools/count_parameters.py counts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from cell_runner import ROOT

from moe_parallel.analysis.study.contenders import Contender
from moe_parallel.config.message import flag
from moe_parallel.errors import InputError
from moe_parallel.tool import last_line

UNUSED_FOLDER = {"save": "unused"}  # checkpoint options need a folder; nothing is written to it
COUNT = ROOT / "tools" / "count_parameters.py"


def count_parameters(
    contender: Contender, experts_per_token: float | None = None
) -> dict[str, Any]:
    """The parameters of the contender's model: total, active and active_compute. The last two are
    None if training decides how many experts compute a token and `experts_per_token` is None.

    The count runs in its own process. This process stays small, because the memory that a run
    inherits at its start counts as part of its peak memory.
    """
    command = [sys.executable, str(COUNT)]
    if experts_per_token is not None:
        command += ["--experts-per-token", str(experts_per_token)]
    for name, value in (contender.options | UNUSED_FOLDER).items():
        parts = value if isinstance(value, list) else [value]
        command += [flag(name), *("none" if part is None else str(part) for part in parts)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = last_line(done.stderr, "no reason given")
        raise InputError(f"contender {contender.name}: {reason.removeprefix(f'{COUNT.name}: ')}")
    return json.loads(done.stdout)
