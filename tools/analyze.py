"""Collect what a trained model selects on given text: Parquet files, and figures in the report.

    python tools/analyze.py --load RUN [--text [NAME=]FILE ...] [--samples N] [--output FOLDER]
    python tools/analyze.py --load RUN --nproc-per-node 8 [--expert-model-parallel-size 4]

A text is a .jsonl file (a document per line, under "text") or a plain text file. Without --text,
the tool reads the held-out text of each domain of the run. It computes in fp32 and does not change
the model. Every rank has a complete model and reads other sequences, unless flags of
pretrain_gpt_moe.py divide the model; the files are the same. They go to RUN/analysis, where
tools/report.py finds them. docs/analysis.md describes them. Besides its own flags, the tool accepts
those of pretrain_gpt_moe.py and of its launcher.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_load, check_positive, progress


def _tool() -> Tool:
    tool = Tool(__file__, __doc__)
    tool.add_argument("--load", metavar="RUN", help="run folder, or one of its checkpoints")
    tool.add_argument(
        "--text", metavar="[NAME=]FILE", nargs="+", help="texts (default: the run's held-out text)"
    )
    tool.add_argument(
        "--samples",
        metavar="N",
        type=int,
        help="maximum number of sequences of each text (default: all)",
    )
    tool.add_argument(
        "--output", metavar="FOLDER", type=Path, help="folder to write (default: RUN/analysis)"
    )
    tool.add_argument(
        "--permutations", metavar="N", type=int, default=1000,
        help="number of permutations in the test of specialization (default: 1000)",
    )  # fmt: skip
    tool.add_argument(
        "--view-tokens", metavar="N", type=int, default=1000,
        help="number of tokens of each text that the report shows as text (default: 1000)",
    )  # fmt: skip
    tool.add_argument("--totals-only", action="store_true", help="do not write selections.parquet")
    return tool


def main(arguments: list[str]) -> int:
    from moe_parallel.launch.program import run_tool_on_ranks

    return run_tool_on_ranks(_tool(), __file__, arguments, lambda own, _: _check(own), _work)


def _check(own: Namespace) -> None:
    check_load(own)
    check_positive(own, "samples", "permutations", "view-tokens")


def _work(arguments: Sequence[str]) -> int:
    own, flags = _tool().parse_known_args(list(arguments))
    _check(own)

    import torch.distributed as dist

    from moe_parallel.collective_errors import agree
    from moe_parallel.config.message import flag
    from moe_parallel.training.routing_analysis import (
        AnalysisOptions,
        analyze,
        named_files,
        output_folder,
    )
    from moe_parallel.training.standalone import evaluation_config, standalone_config

    config = agree(lambda: standalone_config(flags, load=own.load))
    if config.moe.num_experts is None:
        raise InputError(
            f"{flag('load')} {own.load}: the model is dense and has no experts to select"
        )
    on_ranks = agree(lambda: evaluation_config(flags, own.load, dist.get_world_size()))
    options = AnalysisOptions(
        agree(lambda: named_files(own.text or [])),
        own.samples,
        own.permutations,
        own.view_tokens,
        not own.totals_only,
        shlex.join(["python", "tools/analyze.py", *arguments]),
    )
    folder = agree(lambda: output_folder(own.output, Path(own.load)))
    first = dist.get_rank() == 0
    with progress("tokens", None, " tokens") if first else nullcontext(lambda _: None) as advance:
        lines = analyze(config, on_ranks, options, folder, advance)
    if first:
        print("\n".join([*lines, str(folder)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
