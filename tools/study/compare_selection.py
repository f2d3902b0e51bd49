"""Train systems of expert selection under equal conditions, and compare them.

    python tools/study/compare_selection.py --config examples/study.yaml \\
        --selections topk,aoe,top_p,dense --seeds 3 --output studies/first

Each system is trained with each seed in a process of its own, one after the other. Start the same
command again to go on after an interruption; finished runs are not made again, and further systems
and seeds may be added. Exit codes: 0 done, 1 a run failed, 2 a wrong flag, file or value, 75
interrupted. docs/study.md says how to read the result.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cell_runner import ROOT, CellRunner, StopRequest

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.study.contenders import (
    DENSE,
    Contender,
    SharedFile,
    choose_contenders,
    parse_overrides,
)
from moe_parallel.analysis.study.folder import MANIFEST, Cell, Manifest, StudyFolder
from moe_parallel.analysis.study.measures import measures
from moe_parallel.analysis.study.notes import MOST_TOTALS_DIFFER, total_difference
from moe_parallel.analysis.study.results import MEASURED, StudyResults
from moe_parallel.analysis.study.table import parameter_table
from moe_parallel.config import make_config, read_yaml, validate
from moe_parallel.config.message import flag
from moe_parallel.errors import InputError
from moe_parallel.tool import Tool
from moe_parallel.training.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED

UNUSED_FOLDER = {"save": "unused"}  # options on checkpoints want one; nothing is written there
COUNT = ROOT / "tools" / "count_parameters.py"


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    _add_flags(tool)
    return tool.run(arguments, compare)


def compare(options: argparse.Namespace) -> int:
    """Train what is not trained yet, then write the report. Returns the exit code."""
    if options.threads is None:
        options.threads = max(1, len(os.sched_getaffinity(0)) // options.nproc)
    folder = StudyFolder(options.output)
    manifest, asked = plan(options, folder)
    _check_totals(manifest, options.allow_unequal)
    with _alone(folder):
        (folder.path / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        runner = CellRunner(options.nproc, options.threads)
        with StopRequest().listening() as stop:
            failed = train(manifest, asked, runner, stop)
        if stop.asked:
            print("interrupted; the same command goes on from here")
            return EXIT_INTERRUPTED
        if any(cell.is_finished(manifest.train_iters) for cell in asked):
            from moe_parallel.analysis.study.report import write_report  # matplotlib takes a second

            _count_active(manifest, folder)
            print(f"report: {write_report(folder)}")
    for cell in failed:
        print(f"failed: {cell.contender}, seed {cell.seed}; see {cell.output}", file=sys.stderr)
    return EXIT_FAILED if failed else 0


def plan(options: argparse.Namespace, folder: StudyFolder) -> tuple[Manifest, list[Cell]]:
    """What the study is, an earlier part of it included, and which runs this command asks for.

    Raises InputError for anything that could not be trained, or not compared.
    """
    raw = read_yaml(options.config)
    file, overrides = SharedFile.from_raw(raw), parse_overrides(options.override)
    contenders = {
        each.name: each for each in choose_contenders(options.selections, file, overrides)
    }
    for contender in contenders.values():
        _check_trainable(contender, options.nproc)
    first = next(iter(contenders.values())).config.training.seed
    seeds = list(range(first, first + options.seeds))
    manifest = Manifest(contenders, seeds, options.nproc, options.threads, {})
    earlier = folder.manifest()
    if earlier is not None:
        manifest = manifest.joined_to(earlier, file)
    for name, contender in manifest.contenders.items():
        if name not in manifest.parameters:
            manifest.parameters[name] = count_parameters(contender)
    return manifest, list(folder.cells(list(contenders), seeds))


def train(
    manifest: Manifest, cells: list[Cell], runner: CellRunner, stop: StopRequest
) -> list[Cell]:
    """Run the cells that are not finished, until asked to stop; returns those that failed."""
    failed, seconds = [], []
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
            failed.append(cell)
            print(f"{place}: {_failure(cell, code)}", file=sys.stderr, flush=True)
    return failed


def _count_active(manifest: Manifest, folder: StudyFolder) -> None:
    """Count again, and note it, where training has decided how many experts compute a token."""
    for result in StudyResults.read(folder).results:
        measured = result.spreads.get("experts_per_token")
        decided = result.parameters.get("active") is None or MEASURED in result.parameters
        if decided and measured is not None:
            counts = count_parameters(result.contender, measured.mean)
            manifest.parameters[result.name] = counts | {MEASURED: measured.mean}
    (folder.path / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def count_parameters(
    contender: Contender, experts_per_token: float | None = None
) -> dict[str, Any]:
    """Of the contender's model: total, active and active_compute; the last two are None where
    training decides how many experts compute a token, unless `experts_per_token` says it.

    In a process of its own: this one stays small, as what a run inherits when it is started counts
    among its peak memory.
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
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"contender {contender.name}: {reason.removeprefix(f'{COUNT.name}: ')}")
    return json.loads(done.stdout)


def _check_trainable(contender: Contender, processes: int) -> None:
    try:
        validate(make_config(contender.options | UNUSED_FOLDER), processes)
    except InputError as error:
        raise InputError(f"contender {contender.name}: {error}") from None
    data = contender.config.data
    if data.vocab_size is None:
        raise InputError("--config has no vocab-size: give the size of the tokenizer, by which "
                         "parameters are counted")  # fmt: skip


def _check_totals(manifest: Manifest, allow_unequal: bool) -> None:
    """Print the table of parameters; raises InputError if it is no fair comparison."""
    print(parameter_table(manifest.parameters))
    totals = {
        name: counts["total"]
        for name, counts in manifest.parameters.items()
        if manifest.contenders[name].system != DENSE
    }
    if len(totals) < 2:
        return
    difference = total_difference(totals.values())
    least, most = min(totals, key=totals.__getitem__), max(totals, key=totals.__getitem__)
    print(f"total parameters differ by at most {difference:.2%}")
    if difference > MOST_TOTALS_DIFFER and not allow_unequal:
        raise InputError(
            f"{most} has {totals[most]:,} parameters and {least} {totals[least]:,}, "
            f"{difference:.1%} apart: give them equal sizes (--override), or --allow-unequal"
        )


@contextmanager
def _alone(folder: StudyFolder) -> Iterator[None]:
    """Hold the folder, so that a second command cannot train the same runs."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with (folder.path / ".lock").open("a") as lock:
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
    add("--config", type=Path, required=True, metavar="FILE.yaml", help="what all have in common")
    add(
        "--selections", required=True, metavar="A,B,...", type=lambda text: text.split(","),
        help="words of --expert-selection, `dense`, or NAME=WORD for a variant",
    )  # fmt: skip
    add("--output", type=Path, required=True, metavar="FOLDER", help="of this study")
    add("--seeds", type=_at_least_one, default=3, metavar="N",
        help="runs of each: with the seed of the file and those after it (default: 3)")  # fmt: skip
    add("--override", nargs="+", action="extend", default=[], metavar="NAME:flag=value",
        help="an option for one contender alone")  # fmt: skip
    add("--nproc", type=_at_least_one, default=1, metavar="N", help="processes of a run")
    add("--threads", type=_at_least_one, metavar="N",
        help="of each process (default: the cores divided by --nproc)")  # fmt: skip
    add("--allow-unequal", action="store_true",
        help="train although total parameters differ by more than 1 %%")  # fmt: skip


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
