"""Train several systems under equal conditions and compare them.

    python tools/study/compare_selection.py --config examples/study.yaml \\
        --selections topk,aoe,top_p,dense --seeds 3 --output studies/first

Each system is trained with each seed in its own process. A section `study` of the file may add
pilot runs for the learning rate, the terms of the comparison, and tests with a margin. To continue
after an interruption, start the same command again. Finished runs are not repeated, and further
systems and seeds may be added. Exit codes: 0 done, 1 a run failed, 2 a wrong flag, file or value,
75 interrupted or --minutes are over, 76 a run was lost and can continue. docs/study.md explains the
result.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from run_cells import ROOT, STAGES, CellRunner, CellStop, Part, Schedule, train

from moe_parallel.analysis.study.contenders import (
    DENSE,
    Contender,
    SharedFile,
    choose_contenders,
)
from moe_parallel.analysis.study.design import SECTION, TERMS, StudyDesign
from moe_parallel.analysis.study.folder import STUDY_MANIFEST, StudyFolder, StudyManifest
from moe_parallel.analysis.study.measures import student
from moe_parallel.analysis.study.report import (
    MOST_TOTALS_DIFFER,
    parameter_table,
    total_difference,
    write_study_report,
)
from moe_parallel.analysis.study.results import MEASURED, StudyResults
from moe_parallel.config import make_config, read_yaml, validate
from moe_parallel.config.message import flag
from moe_parallel.data.atomic_files import write_atomically
from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, last_line
from moe_parallel.training.signals import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LOST

UNUSED_FOLDER = {"save": "unused"}  # checkpoint options need a folder; nothing is written to it
COUNT = ROOT / "tools" / "count_parameters.py"


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    _add_flags(tool)
    return tool.run(arguments, compare)


def compare(options: argparse.Namespace) -> int:
    """Train the runs that are not finished, then write the report. Returns the exit code."""
    if options.threads is None:
        cores = len(os.sched_getaffinity(0))
        options.threads = max(1, cores // (options.nproc * options.jobs))
    folder = StudyFolder(options.output)
    manifest, seeds = plan(options, folder)
    stages = _stages(options, bool(manifest.design.lr_grid))
    check_totals(manifest, options.allow_unequal)
    with _alone(folder, options.part):
        write_atomically(folder.path / STUDY_MANIFEST, manifest.to_json())
        runner = CellRunner(options.nproc, options.threads, options.jobs)
        schedule = Schedule(folder, manifest, seeds, stages, options.part)
        with CellStop().listening() as stop:
            failed = train(manifest, schedule, runner, stop, options.minutes)
        if stop.asked or any(cell not in failed for cell in schedule.left()):
            reason = "interrupted" if stop.asked else f"--minutes {options.minutes} are over"
            print(f"{reason}; the same command continues from here")
            return EXIT_INTERRUPTED
        compared = folder.cells(seeds)
        if stages == STAGES and options.part is None and any(map(manifest.is_finished, compared)):
            count_active(manifest, folder)
            print(f"report: {write_study_report(folder)}")
    undecided = list(schedule.unknown())
    for cell in failed:
        print(f"failed: {cell.label}; see {cell.output}", file=sys.stderr)
    for name in undecided:
        print(f"not compared: {name}, whose pilot runs are not finished, or all diverged",
              file=sys.stderr)  # fmt: skip
    if any(map(may_continue, failed.values())):
        return EXIT_LOST
    return EXIT_FAILED if failed or undecided else 0


def plan(
    options: argparse.Namespace, folder: StudyFolder
) -> tuple[StudyManifest, dict[str, list[int]]]:
    """The complete study, including its earlier parts, and the seeds that this command requests, by
    contender.

    Raises InputError if something cannot be trained or cannot be compared.
    """
    raw = read_yaml(options.config)
    design = StudyDesign.from_raw(raw.pop(SECTION, None))
    if options.equal is not None:
        design = dataclasses.replace(design, equal=options.equal)
    if design.margin is not None:
        student()  # a missing package is reported before the first run, not after the last
    if not (words := options.selections or design.selections):
        raise InputError(
            f"--selections is not set: name systems, or give the section {SECTION} of --config "
            "a line selections"
        )
    file = SharedFile.from_raw(raw)
    chosen = choose_contenders(words, file, design.selections)
    contenders = {each.name: each for each in chosen}
    for contender in contenders.values():
        check_trainable(contender, options.nproc)
    first = next(iter(contenders.values())).config.training.seed
    seeds = {
        name: list(range(first, first + (options.seeds or design.seeds_for(name))))
        for name in contenders
    }
    design.check_seeds(max(seeds.values(), key=len))
    manifest = StudyManifest(contenders, seeds, options.nproc, options.threads, {}, design)
    earlier = folder.manifest()
    if earlier is not None:
        manifest = manifest.joined_to(earlier, file)
    for name, (option, values) in design.balance_grid.items():
        if name in contenders:
            for value in values:
                check_trainable(contenders[name].with_options({option: value}), options.nproc)
    _fit(manifest, options.nproc)
    return manifest, seeds


def _fit(manifest: StudyManifest, processes: int) -> None:
    """Make the contenders equal on the study's terms, and count their parameters."""
    counted: dict[str, dict[str, Any]] = {}

    def count(contender: Contender) -> dict[str, Any]:
        key = json.dumps([contender.name, contender.options], default=str)
        if key not in counted:
            counted[key] = count_parameters(contender)
        return counted[key]

    for name, contender in manifest.contenders.items():
        if name not in manifest.parameters:
            fitted = manifest.design.terms.fit(contender, manifest.reference, count)
            if fitted:
                manifest.fitted[name] = fitted
                check_trainable(manifest.settled(name), processes)
            manifest.parameters[name] = count(manifest.settled(name))


def check_totals(manifest: StudyManifest, allow_unequal: bool) -> None:
    """Print the table of parameters. Raises InputError if the comparison is not fair."""
    print(parameter_table(manifest.parameters))
    if manifest.design.terms.fits == "width":
        return
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
            f"{difference:.1%} apart: give them equal sizes, or --allow-unequal"
        )


def count_active(manifest: StudyManifest, folder: StudyFolder) -> None:
    """Count the active parameters again, and save them, for contenders whose training has decided
    how many experts compute a token."""
    for result in StudyResults.read(folder).results:
        measured = result.spreads.get("experts_per_token")
        decided = result.parameters.get("active") is None or MEASURED in result.parameters
        if decided and measured is not None:
            counts = count_parameters(result.contender, measured.mean)
            manifest.parameters[result.name] = counts | {MEASURED: measured.mean}
    (folder.path / STUDY_MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def check_trainable(contender: Contender, processes: int) -> None:
    try:
        validate(make_config(contender.options | UNUSED_FOLDER), processes)
    except InputError as error:
        raise InputError(f"contender {contender.name}: {error}") from None


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


def may_continue(code: int) -> bool:
    """Whether a run that ended with this code would continue if it was started again."""
    return code in (EXIT_INTERRUPTED, EXIT_LOST) or code < 0 or code > 128


def _stages(options: argparse.Namespace, has_grid: bool) -> tuple[str, ...]:
    """The stages to train. Raises InputError if processes with parts could not agree on theirs."""
    if options.stage is None and options.part is not None and has_grid:
        raise InputError(
            "--part of a study with lr-grid needs --stage: train grid, then further, balance, seeds"
        )
    if options.stage not in (None, "seeds") and not has_grid:
        raise InputError(f"--stage {options.stage} needs lr-grid in the section study of --config")
    return STAGES if options.stage is None else (options.stage,)


@contextmanager
def _alone(folder: StudyFolder, part: Part | None) -> Iterator[None]:
    """Lock the folder, or a part, so that a second command cannot train the same runs.

    Raises InputError if another command has it.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with (folder.path / ".lock").open("a") as whole:
            fcntl.flock(whole, (fcntl.LOCK_EX if part is None else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            name = ".lock" if part is None else f".lock-{part.first}-of-{part.number}"
            with (folder.path / name).open("a") as lock:
                if part is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield
    except BlockingIOError:
        raise InputError(
            f"--output {folder.path} is in use by another command: wait for it, or name another "
            "folder"
        ) from None


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
        "--selections", metavar="A,B,...", type=lambda text: text.split(","),
        help="names of --expert-selection, `dense`, or NAME=SYSTEM for a variant (default: those "
        "of the section study)",
    )  # fmt: skip
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder of the study")
    add("--seeds", type=_at_least_one, metavar="N",
        help="runs of each contender, from the seed of the file on (default: those of the section "
        "study, or 3)")  # fmt: skip
    add("--equal", choices=tuple(TERMS),
        help="terms of the comparison (default: those of the section study, or "
        "experts)")  # fmt: skip
    add("--override", type=_in_the_file, help=argparse.SUPPRESS)
    add("--part", type=Part.parse, metavar="I/N",
        help="train only every N-th run, from run I on (0/N is the first part); commands with the "
        "other parts train the rest, and report_study.py writes the report")  # fmt: skip
    add("--stage", choices=STAGES,
        help="train only the grids of pilot runs, the further ones, those of balance-grid, or the "
        "compared runs (default: all)")  # fmt: skip
    add("--jobs", type=_at_least_one, default=1, metavar="N",
        help="number of runs at a time (default: 1)")  # fmt: skip
    add("--minutes", type=_at_least_one, metavar="N",
        help="begin no run later than N minutes after the start, and end with code 75 if runs are "
        "left (default: no limit)")  # fmt: skip
    add("--nproc", type=_at_least_one, default=1, metavar="N",
        help="number of processes per run (default: 1)")  # fmt: skip
    add("--threads", type=_at_least_one, metavar="N",
        help="number of threads per process (default: the cores divided by --nproc and "
        "--jobs)")  # fmt: skip
    add("--allow-unequal", action="store_true",
        help="train even if total parameters differ by more than 1%%")  # fmt: skip


def _in_the_file(text: str) -> str:
    raise argparse.ArgumentTypeError(
        "options of one contender are lines of --config, such as switch:moe-router-topk: 1"
    )


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
