"""Ranks that `srun` starts: Slurm's variables of a task, converted to those of torchrun."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PORTS = range(20_000, 30_000)  # below the ports that systems assign to connections


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that srun started."""
    return "SLURM_PROCID" in environment and tasks(environment) > 1


def tasks(environment: Mapping[str, str]) -> int:
    """The number of processes that srun started."""
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    return int(next((environment[name] for name in names if name in environment), "1"))


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a task. MASTER_ADDR and MASTER_PORT stay if they are set."""
    one_gpu_each = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1"
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks(environment)),
        # A process uses the GPU of its local number, unless each task sees only its own GPU.
        "LOCAL_RANK": "0" if one_gpu_each else environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port(environment)),
    }


def first_host(environment: Mapping[str, str]) -> str:
    """The node of task 0: `gpu[07-09,12],cpu1` begins with gpu07."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environment[name] for name in names if environment.get(name)), "localhost")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)


def port(environment: Mapping[str, str]) -> int:
    """A port that is the same for every task of a step, and most likely unique on the node."""
    job, step = (
        int(digits[0]) if (digits := re.match(r"\d+", environment.get(name, ""))) else 0
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    return _PORTS[(17 * job + step) % len(_PORTS)]
