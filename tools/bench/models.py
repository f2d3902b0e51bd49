"""Time whole models against those that a user would take instead, on the same tokens and in turns.

    make bench ARGS="--models"                                  # a look, in about a minute
    make bench ARGS="--models --sizes goals --json models.json" # the sizes of docs/performance
    python tools/bench/models.py --sizes sequence,experts,micro-batch
    python tools/bench/models.py --sizes transformers           # our experts in their models
    python tools/bench/models.py --device cuda --sizes gpu      # on a GPU of 80 GB

On a CPU, it uses one thread and process CPU time; on a GPU, CUDA events. All models have the same
layers and widths, and nearly as many parameters. A forward pass, forward and backward pass
together, and a step of the optimizer are timed. docs/performance/README.md explains the columns.
Exit codes: 0 done, whatever was measured; 2 a wrong flag, or a model that was killed; 130
interrupted, after the measurements so far have been written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

# Otherwise torch logs once that a peer frees what it kept from its last pass.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.errors import InputError
from moe_parallel.platform.device import keep_freed_memory
from moe_parallel.platform.megatron import suppress_warnings
from moe_parallel.tool import Tool, check_positive, load_torch
from tools.bench import benchmark
from tools.bench.benchmark import about, chosen, words
from tools.bench.measurement import STEP, Bench, BenchContender, Patience, measure, work_clock_of
from tools.bench.peers.megatron import one_rank
from tools.bench.results import BenchRow, format_row
from tools.bench.sizes import MODEL_SIZES, SMALL, ModelSize

if TYPE_CHECKING:
    from tools.bench.whole_models import ModelTerms

SECONDS_OF_A_ROW = {"cpu": 20.0, "cuda": 5.0}
KEPT_PRODUCTS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
DTYPES = {"cpu": ["float32", "bfloat16"], "cuda": ["bfloat16", "float32"]}


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("--device", choices=list(DTYPES), default="cpu",
        help="where to run (default: cpu)")  # fmt: skip
    tool.add_argument("--sizes", type=words, metavar="A,B,...", default=[SMALL],
        help=f"of {', '.join(MODEL_SIZES)}; the last three are curves "
        f"(default: {SMALL})")  # fmt: skip
    tool.add_argument("--dtype", type=words, metavar="A,B,...",
        help="float32, bfloat16 (default: both; GPU: bfloat16)")  # fmt: skip
    tool.add_argument("--batches", type=int, default=1, metavar="N",
        help="number of different batches, which take turns: with more than one, the number of "
        "rows of an expert changes, as it does in training (default: 1)")  # fmt: skip
    benchmark.add_flags(tool)
    return tool.run(arguments, lambda own: _time(arguments, own))


def _time(arguments: list[str], options: argparse.Namespace) -> int:
    options.sizes = chosen("--sizes", options.sizes, list(MODEL_SIZES), [SMALL])
    on_cpu = options.device == "cpu"
    dtypes = DTYPES[options.device]
    options.dtype = chosen("--dtype", options.dtype, dtypes, dtypes if on_cpu else dtypes[:1])
    check_positive(options, "batches")
    benchmark.check(options)
    if on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron-Core would use a GPU
    benchmark.check_device(options.device)
    load_torch()
    facts = about("models.py", arguments) | {
        "instructions": torch.backends.cpu.get_cpu_capability()
        if on_cpu
        else torch.cuda.get_device_name(),
        "device": options.device,
        "threads": 1,
    }
    if on_cpu:
        facts |= _kept_products(options.batches)
    return benchmark.run(facts, lambda rows: _measure_all(options, rows), options.json)


def _kept_products(batches: int) -> dict[str, str]:
    """How many products oneDNN keeps compiled, for the processes of the benches.

    By default, contenders whose experts are many would evict one another's. New batches always
    bring new sizes, and more of them would only take memory.
    """
    if batches == 1:
        os.environ.setdefault(KEPT_PRODUCTS, "4096")
    return {KEPT_PRODUCTS: os.environ.get(KEPT_PRODUCTS, "1024")}


def _measure_all(options: argparse.Namespace, rows: list[BenchRow]) -> None:
    """Each bench in a process of its own: Megatron-Core's hooks and oneDNN's compiled products keep
    memory for as long as a process lives, up to several GiB for a bench."""
    suppress_warnings()  # before Megatron-Core is imported
    from tools.bench.whole_models import BENCHES

    for name, dtype in product(options.sizes, options.dtype):
        for size, build in product(MODEL_SIZES[name], BENCHES[name]):
            with ProcessPoolExecutor(1, get_context("spawn"), suppress_warnings) as pool:
                bench = pool.submit(_measure, build, size, dtype, options)
                try:
                    rows += bench.result()
                except BrokenProcessPool:
                    raise InputError(
                        f"{size}, {dtype}: the process was killed, perhaps for its memory: choose "
                        "other --sizes"
                    ) from None
                except torch.OutOfMemoryError:
                    raise InputError(
                        f"{size}, {dtype}: the GPU has too little memory: choose other --sizes"
                    ) from None


def _measure(
    build: Callable[[ModelTerms], Bench], size: ModelSize, dtype: str, options: argparse.Namespace
) -> list[BenchRow]:
    """Measures and prints the rows of one bench."""
    from tools.bench.whole_models import ModelTerms, number_of_weights

    torch.set_num_threads(1)
    keep_freed_memory()
    device, rows = options.device, []
    # A model is launched as in training: its statistics would outlive the memory of a graph.
    clock = work_clock_of(device, replays=False)
    patience = Patience(SECONDS_OF_A_ROW[device], options.turns)
    with one_rank(device) as groups:
        terms = ModelTerms(size, getattr(torch, dtype), groups, options.batches, device)
        bench = build(terms)
        present = [one for one in (*bench.ours, *bench.peers) if isinstance(one, BenchContender)]
        weights = {one.name: number_of_weights(one) for one in present}
        for row in measure(bench, clock, device, patience):
            rows.append(row)
            of_pass = (size.tokens, weights) if row.timed != STEP else ()
            text = format_row(row, *of_pass)
            print(f"\n{text}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
