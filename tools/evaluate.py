"""Evaluate a checkpoint: tasks of lm-evaluation-harness, and bits per byte of held-out documents.

    python tools/evaluate.py --load runs/my --tasks arc_easy hellaswag [--shots 5]
    python tools/evaluate.py --load runs/my --preset aoe-paper
    python tools/evaluate.py --load runs/my --documents [--stride 512]
    python tools/evaluate.py --load runs/my --input mine.jsonl

Every rank has a complete model and a share of the work. For text, flags of pretrain_gpt_moe.py may
divide the model: --nproc-per-node 8 --expert-model-parallel-size 4. The tool accepts the flags of
that program and of its launcher. Tasks need `pip install moe-parallel[evaluation]`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_parallel.config import read_command_line
from moe_parallel.errors import InputError
from moe_parallel.harness.tasks import Wanted, check_folders, wanted_tasks
from moe_parallel.tool import Tool, check_load, check_output, check_positive


def _tool() -> Tool:
    tool = Tool(__file__, __doc__)
    add = tool.add_argument
    add("--load", metavar="RUN", help="run folder, or one of its checkpoints")
    add("--tasks", metavar="TASK", nargs="+", default=[], help="tasks and groups of the harness")
    add("--preset", metavar="NAME",
        help="the tasks and shots of a paper: aoe-paper, dynamic-paper or, without the tasks that "
        "the harness lacks, lory-paper")  # fmt: skip
    add("--shots", metavar="N", type=int,
        help="number of examples in the prompt (default: that of the task or preset)")  # fmt: skip
    add("--include-path", metavar="FOLDER", nargs="+", default=[], help="folders with task files")
    add(
        "--limit",
        metavar="N",
        type=int,
        help="use only the first N documents of each task or domain",
    )
    add("--documents", action="store_true",
        help="print bits per byte and perplexity of the run's held-out documents, by "
        "domain")  # fmt: skip
    add("--input", metavar="FILE", nargs="+", default=[],
        help="print the same for the texts in these files, in a format of preprocess_data.py "
        "(key `text`); each file is a domain")  # fmt: skip
    add("--stride", metavar="N", type=int,
        help="number of tokens by which windows over a document move "
        "(default: --seq-length)")  # fmt: skip
    add("--batch-size", metavar="N", type=int, default=8,
        help="number of sequences that a rank computes at a time (default: 8)")  # fmt: skip
    add("--output", metavar="FILE", help="write the results to this file, as JSON")
    return tool


def main(arguments: list[str]) -> int:
    from moe_parallel.launch.program import run_tool_on_ranks

    return run_tool_on_ranks(_tool(), __file__, arguments, _check, _work)


def _check(own: argparse.Namespace, flags: Sequence[str]) -> Wanted:
    check_load(own)
    read_command_line(flags)  # an unknown flag is told first
    tasks = wanted_tasks(own.tasks, own.preset, own.shots)
    if not (tasks or own.documents or own.input):
        raise InputError("--tasks is not set: name tasks, or a --preset, --documents or --input")
    check_positive(own, "limit", "stride", "batch-size")
    if own.shots is not None and own.shots < 0:
        raise InputError(f"--shots is {own.shots}: it must be at least 0")
    check_folders(own.include_path)
    check_output(own)
    for file in own.input:
        if not Path(file).is_file():
            raise InputError(f"--input {file}: there is no such file")
    return Wanted(tuple(tasks), tuple(own.include_path), own.limit)


def _work(arguments: Sequence[str]) -> int:
    own, flags = _tool().parse_known_args(list(arguments))
    wanted = _check(own, flags)

    from moe_parallel.harness.evaluation import evaluate

    evaluate(argparse.Namespace(**vars(own), flags=flags, wanted=wanted))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
