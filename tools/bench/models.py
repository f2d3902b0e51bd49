"""Time whole models against those that a user would take instead, on the same tokens and in turns.

    make bench ARGS="--models"                                  # a look, in about a minute
    make bench ARGS="--models --sizes goals --json models.json" # the project's goals
    python tools/bench/models.py --sizes sequence,experts,micro-batch

It uses the CPU, one thread and process CPU time, also where there is a GPU. Each model has as many
layers, widths and parameters; forward pass, forward and backward pass, and a step of the optimizer
are timed apart.
docs/performance/README.md explains the columns. Exit codes: 0 done, whatever was measured; 2 a
wrong flag; 130 interrupted, after the measurements so far have been written.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron-Core would use a GPU
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.platform.suppress_warnings import suppress_warnings

suppress_warnings()  # before Megatron-Core is imported

import torch  # noqa: E402

from moe_parallel.errors import InputError  # noqa: E402
from moe_parallel.ops import extension  # noqa: E402
from moe_parallel.parallel import Groups  # noqa: E402
from moe_parallel.tool import Tool, check_positive  # noqa: E402
from moe_parallel.training.exit_codes import EXIT_CTRL_C  # noqa: E402
from tools.bench.about import about  # noqa: E402
from tools.bench.clock import clock_of, keep_freed_memory  # noqa: E402
from tools.bench.command_line import (  # noqa: E402
    check_writable,
    chosen,
    load_of,
    print_about,
    words,
)
from tools.bench.contender import STEP, Bench, Contender  # noqa: E402
from tools.bench.measurement import Patience, measure  # noqa: E402
from tools.bench.peers.megatron import one_rank  # noqa: E402
from tools.bench.results import Row, write_json  # noqa: E402
from tools.bench.sizes import SMALL  # noqa: E402
from tools.bench.table import format_absent, format_model_row, format_row  # noqa: E402
from tools.bench.whole_models.benches import BENCHES  # noqa: E402
from tools.bench.whole_models.model import Terms, number_of_weights  # noqa: E402
from tools.bench.whole_models.sizes import SIZES, ModelSize  # noqa: E402

SECONDS_OF_A_ROW = 20.0
DTYPES = ["float32", "bfloat16"]


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    add = tool.add_argument
    add("--sizes", type=words, metavar="A,B,...", default=[SMALL],
        help=f"of {', '.join(SIZES)}; the last three are curves (default: {SMALL})")  # fmt: skip
    add("--dtype", type=words, metavar="A,B,...", help="float32, bfloat16 (default: both)")
    add("--turns", type=int, metavar="N",
        help="turns per row (default: as many as fit into its time)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the samples of every row too")
    return tool.run(arguments, lambda own: _time(arguments, _checked(own)))


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    if not extension.is_built():
        raise InputError("the C++ extension is not built: run `make set-up`")
    options.sizes = chosen("--sizes", options.sizes, list(SIZES), [SMALL])
    options.dtype = chosen("--dtype", options.dtype, DTYPES, DTYPES)
    check_positive(options, "turns")
    check_writable(options.json)
    return options


def _time(arguments: list[str], options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    keep_freed_memory()
    facts = about("models.py", arguments) | {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
    }
    rows: list[Row] = []
    interrupted = False
    try:
        print_about(facts)
        with one_rank() as groups:
            for bench, size in _benches(options, groups):
                _measure(bench, size, Patience(SECONDS_OF_A_ROW, options.turns), rows)
    except KeyboardInterrupt:
        interrupted = True
        print(f"\ninterrupted after {len(rows)} rows", file=sys.stderr)
    if absent := format_absent(rows):
        print(f"\n{absent}")
    facts |= {"load_after": os.getloadavg(), "interrupted": interrupted}
    print(f"\nload {load_of(facts['load_after'])} after")
    if options.json is not None:
        write_json(options.json, facts, rows)
    return EXIT_CTRL_C if interrupted else 0


def _measure(bench: Bench, size: ModelSize, patience: Patience, rows: list[Row]) -> None:
    """Append each row as soon as it is measured, so that an interruption keeps it."""
    present = [one for one in (*bench.ours, *bench.peers) if isinstance(one, Contender)]
    weights = {one.name: number_of_weights(one) for one in present}
    for row in measure(bench, clock_of("cpu"), "cpu", patience):
        rows.append(row)
        of_step = row.timed == STEP
        text = format_row(row) if of_step else format_model_row(row, size.tokens, weights)
        print(f"\n{text}", flush=True)


def _benches(options: argparse.Namespace, groups: Groups) -> Iterator[tuple[Bench, ModelSize]]:
    """One at a time, because the models of a bench take memory."""
    for name in options.sizes:
        for dtype in (getattr(torch, dtype) for dtype in options.dtype):
            for size in SIZES[name]:
                for build in BENCHES[name]:
                    yield build(Terms(size, dtype, groups)), size
                    gc.collect()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
