"""Train a model on 1, 2, 4, ... nodes or in several layouts, and report how its speed scales.

    python tools/study/scaling.py run studies/strong --config my.yaml --nodes 1 2 4 8
    python tools/study/scaling.py report studies/strong

`run` submits a job for each cell: a number of nodes with a value of each flag in --vary. The same
command submits again only the cells that are neither finished nor in the queue.
docs/scaling_study.md has an example and explains the columns of the report.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from run_cells import ROOT, SCRIPT

from moe_parallel.analysis.scaling import (
    FAILED,
    FINISHED,
    QUEUED,
    ScalingCell,
    cells,
    parse_vary,
    read_cells,
    rows_of,
    write_scaling_report,
)
from moe_parallel.config import read_yaml
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import NODES, one_node
from moe_parallel.tool import Tool, check_positive, last_line

JOB = ROOT / "examples" / "slurm" / "pretrain.sbatch"


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    commands = tool.add_commands()
    run = commands.add_parser("run", help="submit the cells that are not finished")
    run.add_argument("study", type=Path, help="the folder of the study")
    add = run.add_argument
    add("--config", metavar="FILE.yaml", type=Path, required=True, help="file that all cells share")
    add("--nodes", metavar="N", type=int, nargs="+", required=True, help="numbers of nodes")
    add("--vary", nargs="+", default=[], metavar="FLAG=A,B", help="flags and their values")
    add(
        "--weak",
        action="store_true",
        help="multiply the global batch by the number of nodes",
    )
    add(
        "--ranks-per-node",
        metavar="N",
        type=int,
        default=8,
        help="number of processes on a node (default: 8)",
    )
    run.add_argument("--sbatch", default="", metavar="WORDS", help="further flags of sbatch")
    run.add_argument(
        "--local", action="store_true", help="run the cells on this machine, without Slurm"
    )
    report = commands.add_parser("report", help="write scaling.csv and scaling.html")
    report.add_argument("study", type=Path, help="the folder of the study")
    report.add_argument(
        "--warm-up",
        metavar="N",
        type=int,
        default=5,
        help="leave out the first N iterations (default: 5)",
    )
    report.add_argument(
        "--node",
        metavar="NODE",
        help=f"also plan each cell, on {', '.join(NODES)} or on the node that a JSON file "
        "describes",
    )
    words = ["python", "tools/study/scaling.py", *arguments]
    return tool.run(
        arguments, lambda own: _run(own) if own.command == "run" else _report(own, words)
    )


def _run(own: Namespace) -> int:
    check_positive(own, "ranks-per-node")
    if min(own.nodes) < 1:
        raise InputError(f"--nodes {min(own.nodes)}: it must be at least 1")
    options = {name.replace("-", "_"): value for name, value in read_yaml(own.config).items()}
    varied = parse_vary(own.vary)
    ranks, code = own.ranks_per_node, 0
    grid = list(
        cells(own.study.absolute(), options, own.nodes, varied, ranks_per_node=ranks, weak=own.weak)
    )
    reasons = [cell.why_not() for cell in grid]  # a wrong flag ends the study before its first job
    queued = set() if own.local else _queue()
    for cell, reason in zip(grid, reasons, strict=True):
        if reason is not None:
            print(f"{cell.name}: not feasible: {reason}")
            continue
        cell.write()
        state = cell.state(queued)
        if state in (FINISHED, QUEUED):
            print(f"{cell.name}: {state}")
            continue
        if state == FAILED:
            print(f"{cell.name}: failed before: {cell.last_line}")
        if not own.local:
            print(f"{cell.name}: job {_submit(cell, ranks, own.sbatch)}")
        elif failed := _run_here(cell):
            print(f"{cell.name}: exit code {failed}: {cell.last_line}")
            code = 1
        else:
            print(f"{cell.name}: {FINISHED}")
    return code


def _queue() -> set[str]:
    """The numbers of the user's jobs that run or wait."""
    return set(_slurm(["squeue", "--noheader", "--me", "--format=%A"]).split())


def _submit(cell: ScalingCell, ranks_per_node: int, flags: str) -> str:
    """The number of the new job of a cell. `flags`: further flags of sbatch."""
    words = ["sbatch", "--parsable", "--nodes", str(cell.nodes)]
    words += ["--job-name", "scaling", "--output", str(cell.output)]
    words += [*shlex.split(flags), str(JOB), str(cell.run)]
    said = _slurm([*words, "--config", str(cell.config_file)], ranks_per_node)
    job = said.strip().split(";")[0]
    cell.job_file.write_text(job)
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


def _run_here(cell: ScalingCell) -> int:
    """Trains a cell on this machine; returns the exit code."""
    command = [sys.executable, str(SCRIPT), "--nproc-per-node", str(cell.ranks)]
    command += ["--config", str(cell.config_file)]
    command += ["--save", str(cell.run), "--load", str(cell.run)]
    cell.job_file.write_text("local")
    with cell.output.open("wb") as output:
        return subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode


def _report(own: Namespace, words: list[str]) -> None:
    if own.warm_up < 0:
        raise InputError(f"--warm-up is {own.warm_up}: it must be at least 0")
    if not own.study.is_dir():
        raise InputError(f"{own.study} is not a folder: name the folder of a study")
    found = read_cells(own.study)
    for cell in found:
        if not cell.is_finished:
            print(f"not finished: {cell.name}: {cell.last_line}")
    cluster = None if own.node is None else one_node(own.node)
    rows, reasons = rows_of(found, own.warm_up, cluster)
    for name, reason in reasons.items():
        print(f"no plan: {name}: {reason}")
    for file in write_scaling_report(rows, own.study, words):
        print(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
