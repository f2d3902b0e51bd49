"""Train several systems under equal conditions and compare them.

    python tools/study/compare_selection.py --config examples/study.yaml \\
        --selections topk,aoe,top_p,dense --seeds 3 --output studies/first

Each system is trained with each seed in its own process, one after the other. To continue after an
interruption, start the same command again. Finished runs are not repeated, and further systems and
seeds may be added. Exit codes: 0 done, 1 a run failed, 2 a wrong flag, file or value, 75
interrupted, 76 a run was lost and would go on. docs/study.md explains the result.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cell_runner import CellRunner, StopRequest
from study_plan import check_totals, count_active, plan

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.study.folder import MANIFEST, Cell, StudyFolder, StudyManifest
from moe_parallel.analysis.study.measures import measures
from moe_parallel.data.atomic_files import write_atomically
from moe_parallel.errors import InputError
from moe_parallel.tool import Tool
from moe_parallel.training.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LOST


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    _add_flags(tool)
    return tool.run(arguments, compare)


def compare(options: argparse.Namespace) -> int:
    """Train the runs that are not finished, then write the report. Returns the exit code."""
    if options.threads is None:
        options.threads = max(1, len(os.sched_getaffinity(0)) // options.nproc)
    folder = StudyFolder(options.output)
    manifest, asked = plan(options, folder)
    check_totals(manifest, options.allow_unequal)
    if options.part is not None:
        asked = options.part.of(asked)
    with _alone(folder, options.part):
        write_atomically(folder.path / MANIFEST, manifest.to_json())
        runner = CellRunner(options.nproc, options.threads)
        with StopRequest().listening() as stop:
            failed = train(manifest, asked, runner, stop)
        if stop.asked:
            print("interrupted; the same command continues from here")
            return EXIT_INTERRUPTED
        if options.part is None and any(cell.is_finished(manifest.train_iters) for cell in asked):
            from moe_parallel.analysis.study.study_report import (
                write_report,  # matplotlib takes a second
            )

            count_active(manifest, folder)
            print(f"report: {write_report(folder)}")
    for cell in failed:
        print(f"failed: {cell.contender}, seed {cell.seed}; see {cell.output}", file=sys.stderr)
    if any(map(may_continue, failed.values())):
        return EXIT_LOST
    return EXIT_FAILED if failed else 0


def may_continue(code: int) -> bool:
    """Whether a run that ended with this code would go on if it was started again."""
    return code in (EXIT_INTERRUPTED, EXIT_LOST) or code < 0 or code > 128


def train(
    manifest: StudyManifest, cells: list[Cell], runner: CellRunner, stop: StopRequest
) -> dict[Cell, int]:
    """Run the cells that are not finished, until a stop is requested.

    Returns the exit codes of those that failed.
    """
    failed: dict[Cell, int] = {}
    seconds = []
    left = [cell for cell in cells if not cell.is_finished(manifest.train_iters)]
    if len(left) < len(cells):
        print(f"{len(cells) - len(left)} of {len(cells)} runs are finished already")
    for number, cell in enumerate(left, start=1):
        if stop.asked:
            break
        place = f"[{number:>{len(str(len(left)))}}/{len(left)}] {cell.contender}, seed {cell.seed}"
        print(f"{place}: training; to follow it: tail -f {cell.output}", flush=True)
        begin = time.monotonic()
        config = manifest.contenders[cell.contender].cell_config(cell.seed, str(cell.folder))
        code = runner.run(cell, config, stop)
        seconds.append(time.monotonic() - begin)
        if cell.is_finished(manifest.train_iters) and code == 0:
            ahead = (len(left) - number) * sum(seconds) / len(seconds)
            print(f"{place}: {_outcome(cell)}; {_duration(seconds[-1])}, {_duration(ahead)} left")
        elif not stop.asked:
            failed[cell] = code
            print(f"{place}: {_failure(cell, code)}", file=sys.stderr, flush=True)
    return failed


@dataclass(frozen=True)
class Part:
    """Every `number`-th run of a study, from the `first` one on."""

    first: int
    number: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """`0/4`, the first of four parts."""
        if not (match := re.fullmatch(r"([0-9]+)/([1-9][0-9]*)", text)):
            raise argparse.ArgumentTypeError(f"{text} is not I/N, such as 0/4")
        first, number = int(match[1]), int(match[2])
        if first >= number:
            raise argparse.ArgumentTypeError(
                f"{text}: the parts are 0/{number} to {number - 1}/{number}"
            )
        return cls(first, number)

    def of(self, cells: list[Cell]) -> list[Cell]:
        return cells[self.first :: self.number]


@contextmanager
def _alone(folder: StudyFolder, part: Part | None) -> Iterator[None]:
    """Lock the folder, or a part, so that a second command cannot train the same runs."""
    name = ".lock" if part is None else f".lock-{part.first}-of-{part.number}"
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with (folder.path / name).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError:
        raise InputError(
            f"--output {folder.path} is at work: wait for that command, or name another folder"
        ) from None


def _outcome(cell: Cell) -> str:
    numbers = measures(RunHistory.from_records(cell.records()))
    losses = [
        f"{name.rpartition('/')[0]} {value:.4f}"
        for name, value in numbers.items()
        if name.endswith("/loss")
    ]
    return f"loss {', '.join(losses)}; {numbers['tokens_per_second']:,.0f} tokens/s"


def _failure(cell: Cell, code: int) -> str:
    if code == 0:
        return "ended without an evaluation: give --config a --split with held-out text"
    lines = cell.output.read_text(errors="replace").strip().splitlines()
    return f"failed with exit code {code}: {lines[-1] if lines else 'it printed nothing'}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.0f} s"


def _add_flags(tool: Tool) -> None:
    add = tool.add_argument
    add(
        "--config",
        type=Path,
        required=True,
        metavar="FILE.yaml",
        help="configuration that all contenders share",
    )
    add(
        "--selections", required=True, metavar="A,B,...", type=lambda text: text.split(","),
        help="names of --expert-selection, `dense`, or NAME=SYSTEM for a variant",
    )  # fmt: skip
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder of the study")
    add("--seeds", type=_at_least_one, default=3, metavar="N",
        help="runs per contender, from the seed of the file on (default: 3)")  # fmt: skip
    add("--override", nargs="+", action="extend", default=[], metavar="NAME:flag=value",
        help="an option for one contender only")  # fmt: skip
    add("--part", type=Part.parse, metavar="I/N",
        help="train only every N-th run, from run I on (0/N is the first part), beside commands "
        "with the other parts; report_study.py then writes the report")  # fmt: skip
    add("--nproc", type=_at_least_one, default=1, metavar="N", help="number of processes per run")
    add("--threads", type=_at_least_one, metavar="N",
        help="number of threads per process (default: the cores divided by --nproc)")  # fmt: skip
    add("--allow-unequal", action="store_true",
        help="train even if total parameters differ by more than 1 %%")  # fmt: skip


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
