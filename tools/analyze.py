"""Collect what a trained model selects on given text: Parquet files, and figures in the report.

    python tools/analyze.py --load RUN [--text [NAME=]FILE ...] [--samples N] [--output FOLDER]

A text is a .jsonl file (a document per line, under "text") or a plain text file. Without --text,
the tool reads the held-out text of each domain of the run. It runs on one process, in fp32,
whatever layout trained the model, and does not change the model. The files go to RUN/analysis,
where tools/report.py finds them. docs/analysis.md describes them. Besides its own flags, the tool
accepts those of pretrain_gpt_moe.py.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from pathlib import Path

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_load, check_positive, load_torch, progress


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("--load", metavar="RUN", help="run folder, or one of its checkpoints")
    tool.add_argument(
        "--text", metavar="[NAME=]FILE", nargs="+", help="texts (default: held-out text of the run)"
    )
    tool.add_argument(
        "--samples", metavar="N", type=int, help="most sequences of each text (default: all)"
    )
    tool.add_argument(
        "--output", metavar="FOLDER", type=Path, help="folder to write (default: RUN/analysis)"
    )
    tool.add_argument(
        "--permutations", metavar="N", type=int, default=1000,
        help="permutations of the test of specialization (1000)",
    )  # fmt: skip
    tool.add_argument(
        "--view-tokens", metavar="N", type=int, default=1000,
        help="tokens of each text that the report shows as text (1000)",
    )  # fmt: skip
    tool.add_argument("--totals-only", action="store_true", help="do not write selections.parquet")
    return tool.run_with_training_flags(
        arguments, lambda own, flags: _analyze(own, flags, arguments)
    )


def _analyze(own: Namespace, flags: list[str], arguments: list[str]) -> None:
    check_load(own)
    check_positive(own, "samples", "permutations", "view-tokens")
    load_torch()

    from moe_parallel.config.message import flag
    from moe_parallel.training.routing_analysis import (
        AnalysisOptions,
        analyze,
        named_files,
        output_folder,
    )
    from moe_parallel.training.standalone import standalone_config

    config = standalone_config(flags, load=own.load)
    if config.moe.num_experts is None:
        raise InputError(f"{flag('load')} {own.load}: the model is dense, and selects no experts")
    options = AnalysisOptions(
        named_files(own.text or []),
        own.samples,
        own.permutations,
        own.view_tokens,
        not own.totals_only,
        shlex.join(["python", "tools/analyze.py", *arguments]),
    )
    folder = output_folder(own.output, Path(own.load))
    with progress("tokens", None, unit=" tokens") as advance:
        lines = analyze(config, options, folder, advance)
    print("\n".join([*lines, str(folder)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
