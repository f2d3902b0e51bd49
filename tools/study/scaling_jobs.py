"""Starts the cells of a scaling study: as jobs of Slurm, or on this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from cell_runner import ROOT, SCRIPT

from moe_parallel.analysis.scaling.folder import CellFolder
from moe_parallel.errors import InputError
from moe_parallel.tool import last_line

JOB = ROOT / "examples" / "slurm" / "pretrain_srun.sbatch"


def queue() -> set[str]:
    """The numbers of the user's jobs that run or wait."""
    return set(_slurm(["squeue", "--noheader", "--me", "--format=%A"]).split())


def submit(folder: CellFolder, ranks_per_node: int, flags: str) -> str:
    """The number of the new job of a cell. `flags`: further flags of sbatch."""
    words = ["sbatch", "--parsable", "--nodes", str(folder.cell.nodes)]
    words += ["--job-name", "scaling", "--output", str(folder.output)]
    words += [*shlex.split(flags), str(JOB), str(folder.run)]
    said = _slurm([*words, "--config", str(folder.config_file)], ranks_per_node)
    job = said.strip().split(";")[0]
    folder.job_file.write_text(job)
    return job


def _slurm(words: list[str], ranks_per_node: int | None = None) -> str:
    environment = dict(os.environ)
    if ranks_per_node is not None:
        environment["RANKS_PER_NODE"] = str(ranks_per_node)
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise InputError(
            f"{words[0]} was not found: run this on a login node, or give --local"
        ) from None
    if done.returncode != 0:
        raise InputError(f"{words[0]}: {last_line(done.stderr, 'no reason given')}")
    return done.stdout


def run_here(folder: CellFolder) -> int:
    """Trains a cell on this machine; returns the exit code."""
    command = [sys.executable, str(SCRIPT), "--nproc-per-node", str(folder.cell.ranks)]
    command += ["--config", str(folder.config_file)]
    command += ["--save", str(folder.run), "--load", str(folder.run)]
    folder.job_file.write_text("local")
    with folder.output.open("wb") as output:
        return subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
