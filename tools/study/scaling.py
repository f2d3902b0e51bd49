"""Train the same model on 1, 2, 4, ... nodes, and report how its speed scales.

    python tools/study/scaling.py run studies/strong --config my.yaml --nodes 1 2 4 8
    python tools/study/scaling.py report studies/strong

`run` submits a job for each cell: a number of nodes with a value of each flag in --vary. The same
command submits again only what is neither finished nor in the queue. docs/scaling_study.md has an
example and explains the columns of the report.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from cell_runner import ROOT, SCRIPT

from moe_parallel.analysis.scaling.folder import FAILED, FINISHED, QUEUED, CellFolder
from moe_parallel.analysis.scaling.grid import cells, parse_vary
from moe_parallel.analysis.scaling.report import rows_of, write_report
from moe_parallel.config import read_yaml
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import NODES, Node
from moe_parallel.tool import Tool, check_positive

JOB = ROOT / "examples" / "slurm" / "pretrain_srun.sbatch"


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    commands = tool.add_commands()
    run = commands.add_parser("run", help="submit the cells that are not finished")
    run.add_argument("study", type=Path, help="the folder of the study")
    run.add_argument("--config", type=Path, required=True, help="YAML file that all cells share")
    run.add_argument("--nodes", type=int, nargs="+", required=True, help="numbers of nodes")
    run.add_argument("--vary", nargs="+", default=[], metavar="FLAG=A,B", help="values of flags")
    run.add_argument("--weak", action="store_true", help="multiply the global batch by the nodes")
    run.add_argument("--ranks-per-node", type=int, default=8, help="processes of a node (8)")
    run.add_argument("--sbatch", default="", metavar="WORDS", help="further flags of sbatch")
    run.add_argument("--local", action="store_true", help="run here, one after the other")
    report = commands.add_parser("report", help="write scaling.csv and scaling.png")
    report.add_argument("study", type=Path, help="the folder of the study")
    report.add_argument("--warm-up", type=int, default=5, help="first iterations left out (5)")
    report.add_argument(
        "--node", help=f"plan on {', '.join(NODES)}, or on the node that a JSON file describes"
    )
    return tool.run(arguments, lambda own: _run(own) if own.command == "run" else _report(own))


def _run(own: Namespace) -> int:
    check_positive(own, "ranks-per-node")
    if min(own.nodes) < 1:
        raise InputError(f"--nodes {min(own.nodes)}: it must be at least 1")
    options = {name.replace("-", "_"): value for name, value in read_yaml(own.config).items()}
    varied = parse_vary(own.vary)
    grid = list(cells(options, own.nodes, varied, ranks_per_node=own.ranks_per_node, weak=own.weak))
    study, code = own.study.absolute(), 0
    reasons = [cell.why_not() for cell in grid]  # a wrong flag ends the study before its first job
    queue = set() if own.local else _queue()
    for cell, reason in zip(grid, reasons, strict=True):
        if reason is not None:
            print(f"{cell.name}: not feasible: {reason}")
            continue
        folder = CellFolder.of(study, cell)
        folder.write()
        state = folder.state(queue)
        if state in (FINISHED, QUEUED):
            print(f"{cell.name}: {state}")
            continue
        if state == FAILED:
            print(f"{cell.name}: failed before: {folder.last_line}")
        if not own.local:
            print(f"{cell.name}: job {_submit(folder, own)}")
        elif failed := _run_here(folder):
            print(f"{cell.name}: exit code {failed}: {folder.last_line}")
            code = 1
        else:
            print(f"{cell.name}: {FINISHED}")
    return code


def _queue() -> set[str]:
    """The numbers of the user's jobs that run or wait."""
    return set(_slurm(["squeue", "--noheader", "--me", "--format=%A"]).split())


def _submit(folder: CellFolder, own: Namespace) -> str:
    words = ["sbatch", "--parsable", "--nodes", str(folder.cell.nodes)]
    words += ["--job-name", "scaling", "--output", str(folder.output)]
    words += [*shlex.split(own.sbatch), str(JOB), str(folder.run)]
    said = _slurm([*words, "--config", str(folder.config_file)], own.ranks_per_node)
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
        raise InputError(f"{words[0]} is not found: run on a login node, or --local") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"{words[0]}: {reason}")
    return done.stdout


def _run_here(folder: CellFolder) -> int:
    command = [sys.executable, str(SCRIPT), "--nproc-per-node", str(folder.cell.ranks)]
    command += ["--config", str(folder.config_file)]
    command += ["--save", str(folder.run), "--load", str(folder.run)]
    folder.job_file.write_text("local")
    with folder.output.open("wb") as output:
        return subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode


def _report(own: Namespace) -> None:
    if own.warm_up < 0:
        raise InputError(f"--warm-up is {own.warm_up}: it must be at least 0")
    if not own.study.is_dir():
        raise InputError(f"{own.study} is no folder: name the folder of a study")
    folders = CellFolder.read_all(own.study)
    for each in folders:
        if not each.is_finished:
            print(f"not finished: {each.cell.name}: {each.last_line}")
    rows = rows_of(folders, own.warm_up, None if own.node is None else _node(own.node))
    for file in write_report(rows, own.study):
        print(file)


def _node(word: str) -> Node:
    if word in NODES:
        return NODES[word]
    try:
        return Node(**json.loads(Path(word).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"--node {word}: it is none of {', '.join(NODES)}, and no file with the fields of "
            f"Node in moe_parallel/plan/cluster.py: {error}"
        ) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
