"""Time every operator against its peers, on the same inputs and in turns.

    python tools/bench/run.py                                # a look, in about a minute
    python tools/bench/run.py --sizes goals --json cpu.json  # those of docs/performance, in a
                                                             # quarter of an hour
    python tools/bench/run.py --device cuda --sizes goals --ops permute,grouped_gemm

On a CPU, it uses one thread and process CPU time. docs/performance/README.md explains the columns
and how the numbers are measured. Exit codes: 0 done, whatever was measured; 2 a wrong flag; 130
interrupted, after the measurements so far have been written.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

# Otherwise torch logs once that a peer frees what it kept from its last pass.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.errors import InputError
from moe_parallel.ops import select_backend
from moe_parallel.platform.device import keep_freed_memory
from moe_parallel.tool import Tool
from tools.bench import benchmark
from tools.bench.benchmark import about, chosen, words
from tools.bench.inputs import Draw
from tools.bench.layers import BENCHES
from tools.bench.measurement import Patience, measure, work_clock_of
from tools.bench.peers import megatron
from tools.bench.results import BenchRow, format_row
from tools.bench.sizes import ERC, GOALS, SMALL, sizes_of

SECONDS_OF_A_ROW = {SMALL: 1.0, GOALS: 15.0, ERC: 15.0}
PEERS = ("transformers", "transformer-engine")
DTYPES = {"cpu": ["float32", "bfloat16"], "cuda": ["bfloat16", "float16", "float32"]}


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    _add_flags(tool)
    return tool.run(arguments, lambda own: _time(arguments, _checked(own)))


def _time(arguments: list[str], options: argparse.Namespace) -> int:
    return benchmark.run(
        _about(arguments, options), lambda rows: _measure_all(options, rows), options.json
    )


def _measure_all(options: argparse.Namespace, rows: list[BenchRow]) -> None:
    if options.device == "cpu":
        torch.set_num_threads(1)
        if not keep_freed_memory():
            print("this C library has no mallopt: page faults of new memory count", flush=True)
    ours, clock = select_backend("native"), work_clock_of(options.device)
    sizes = sizes_of(options.sizes, options.device)
    needs_megatron = options.device == "cpu" and "routed_layer" in options.ops
    patience = Patience(SECONDS_OF_A_ROW[options.sizes], options.turns)
    with megatron.one_rank() if needs_megatron else nullcontext():
        for dtype in options.dtype:
            draw = Draw(getattr(torch, dtype), options.device)
            benches = (BENCHES[op](size, draw, ours) for op in options.ops for size in sizes[op])
            for bench in benches:
                for row in measure(bench, clock, options.device, patience):
                    rows.append(row)
                    print(f"\n{format_row(row)}", flush=True)


def _about(arguments: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Facts that a reader needs to judge the numbers."""
    facts = about("run.py", arguments)
    for package in PEERS:
        with suppress(importlib.metadata.PackageNotFoundError):
            facts["software"][package] = importlib.metadata.version(package)
    return facts | {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": options.device,
        "threads": 1 if options.device == "cpu" else torch.get_num_threads(),
    }


def _add_flags(tool: Tool) -> None:
    add = tool.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where to run (default: cpu)")
    add("--sizes", choices=[SMALL, GOALS, ERC], default=SMALL,
        help="small: a quick check; goals: those of docs/performance; erc: the layer of "
        "examples/papers/erc (default: small)")  # fmt: skip
    add("--ops", type=words, metavar="A,B,...", help=f"some of {', '.join(BENCHES)} (default: all)")
    add("--dtype", type=words, metavar="A,B,...",
        help="some of float32, bfloat16, float16 (default: the first two; GPU: "
        "bfloat16)")  # fmt: skip
    benchmark.add_flags(tool)


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    """The options, checked and with defaults filled in."""
    benchmark.check(options)
    benchmark.check_device(options.device)
    measured = list(sizes_of(options.sizes, options.device))
    options.ops = chosen("--ops", options.ops, list(BENCHES), measured)
    dtypes = DTYPES[options.device]
    default = dtypes if options.device == "cpu" else dtypes[:1]
    options.dtype = chosen("--dtype", options.dtype, dtypes, default)
    if missing := [op for op in options.ops if op not in measured]:
        raise InputError(f"--ops {','.join(missing)}: it has no such sizes; use --sizes {SMALL}")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
