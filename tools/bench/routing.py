"""Time a model under imbalance: the same model, with the load of its experts forced.

    make bench ARGS="--routing hot:1,zipf"             # and balanced, in about a minute
    make bench ARGS="--routing hot:1 --budget 8"       # also with --moe-activation-budget 8
    python tools/bench/routing.py --routing trace:runs/x/metrics.jsonl --expert-selection aoe

The experts are divided over --ranks processes of this machine, so a busy expert makes a busy rank.
Each line is a workload of --moe-router-force-routing. The columns are: the rows of the busiest rank
over the mean; the CPU time of a forward and backward pass on the slowest rank; the most memory that
one rank allocates in it; and the activations that one rank keeps. Ratios compare with balanced. The
passes of the workloads take turns. The tool uses the CPU, with one thread for each rank. Exit
codes: 0 done, 2 a wrong flag, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron-Core would use a GPU

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.platform.megatron import suppress_warnings

suppress_warnings()  # before Megatron-Core is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from moe_parallel.config import ParallelConfig  # noqa: E402
from moe_parallel.config.forced_routing import parse_forced_routing  # noqa: E402
from moe_parallel.errors import InputError  # noqa: E402
from moe_parallel.parallel import destroy_groups, initialize_groups  # noqa: E402
from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu  # noqa: E402
from moe_parallel.tool import Tool, check_positive  # noqa: E402
from moe_parallel.training.engine import Engine  # noqa: E402
from tools.bench.benchmark import about, words  # noqa: E402
from tools.bench.measurement import (  # noqa: E402
    BenchContender,
    Patience,
    WorkTimer,
    peak_bytes,
    saved_bytes,
    take_turns,
    work_clock_of,
)
from tools.bench.sizes import ModelSize  # noqa: E402
from tools.bench.whole_models import (  # noqa: E402
    ModelTerms,
    engine_model,
    engine_of,
)

BALANCED = "balanced"
SEED = 1
TIMEOUT = timedelta(minutes=10)
SYSTEMS = ("topk", "top_p", "aoe", "aoe_top_p")
_LINE = "{:<32}{:>10}{:>12}{:>12}{:>10}{:>12}{:>10}"
_HEADS = ("workload", "max/mean", "CPU ms", "x balanced", "peak MiB", "x balanced", "saved MiB")


@dataclass(frozen=True)
class ForcedWorkload:
    """A forced routing, with or without a limit on the experts' activations."""

    name: str  # as --moe-router-force-routing takes it
    budget: float | None  # MiB

    def __str__(self) -> str:
        return self.name if self.budget is None else f"{self.name}, budget {self.budget:g} MiB"

    @property
    def flags(self) -> list[str]:
        flags = ["--moe-router-force-routing", self.name]
        if self.budget is not None:
            flags += ["--moe-activation-budget", str(self.budget)]
        return flags


@dataclass(frozen=True)
class Task:
    """What is measured; the first workload is the one that all are compared with."""

    system: str
    workloads: tuple[ForcedWorkload, ...]
    hidden_size: int
    seq_length: int
    turns: int


@dataclass(frozen=True)
class Measured:
    """One workload on one rank."""

    rows: float  # that this rank's experts received in a pass, over all layers
    seconds: Sequence[float]  # of each pass: forward and backward
    peak_bytes: int
    saved_bytes: int


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    add = tool.add_argument
    add("--routing", type=words, metavar="A,B,...", default=["hot:1", "zipf"],
        help="workloads, as in --moe-router-force-routing (default: hot:1,zipf)")  # fmt: skip
    add("--expert-selection", choices=SYSTEMS, default=SYSTEMS[0],
        help="the system (default: %(default)s)")  # fmt: skip
    add("--budget", type=float, metavar="MIB",
        help="measure each workload with this --moe-activation-budget too")  # fmt: skip
    add("--ranks", type=int, default=2, metavar="N",
        help="number of processes, which divide the experts (default: %(default)s)")  # fmt: skip
    add("--hidden-size", type=int, default=256, metavar="D",
        help="width of the model; experts have four times that (default: %(default)s)")  # fmt: skip
    add("--seq-length", type=int, default=512, metavar="S",
        help="tokens of a sequence; a rank has two of them (default: %(default)s)")  # fmt: skip
    add("--turns", type=int, default=5, metavar="N",
        help="passes of each workload (default: %(default)s)")  # fmt: skip
    return tool.run(arguments, lambda own: _run(arguments, own))


def _run(arguments: list[str], own: argparse.Namespace) -> int:
    check_positive(own, "ranks", "hidden-size", "seq-length", "turns")
    if own.budget is not None and not own.budget > 0:
        raise InputError(f"--budget is {own.budget}: it must be above 0")
    for text in own.routing:
        parse_forced_routing(text)
    names = [BALANCED, *(name for name in own.routing if name != BALANCED)]
    budgets = [None] if own.budget is None else [None, own.budget]
    task = Task(
        own.expert_selection,
        tuple(ForcedWorkload(name, budget) for name in names for budget in budgets),
        own.hidden_size,
        own.seq_length,
        own.turns,
    )
    facts = about("routing.py", arguments)
    print(f"{facts['command']}   ({facts['date']})\nmachine   {facts['machine']}", flush=True)
    print(f"\n{format_workloads(task, measure_on_ranks(task, own.ranks))}")
    return 0


def measure_on_ranks(task: Task, ranks: int) -> list[list[Measured]]:
    """The measurements of every rank, each in a process of its own."""
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool,
    ):
        rank = partial(measure_in_world, task, ranks, str(Path(folder) / "store"))
        return list(pool.map(rank, range(ranks)))


def measure_in_world(task: Task, ranks: int, store: str, rank: int) -> list[Measured]:
    """The workloads on this rank of a new world, which all ranks enter together.

    `store`: a path by which the ranks find each other.
    """
    torch.set_num_threads(1)
    adapt_megatron_to_cpu()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    try:
        return measure_workloads(task)
    finally:
        dist.destroy_process_group()


def measure_workloads(task: Task) -> list[Measured]:
    """The workloads on this rank of the current world. Collective."""
    ranks = dist.get_world_size()
    groups = initialize_groups(ParallelConfig(expert_model_parallel_size=ranks))
    model_parallel_cuda_manual_seed(SEED)
    size = ModelSize(d=task.hidden_size, f=4 * task.hidden_size, S=task.seq_length, V=512)
    terms = ModelTerms(size, torch.float32, groups)
    system = ["--expert-selection", task.system, "--moe-aux-loss-coeff", "0"]
    system += ["--expert-model-parallel-size", str(ranks)]
    engines = [engine_of([*system, *each.flags], terms) for each in task.workloads]
    models = [
        engine_model(str(each), engine, terms)
        for each, engine in zip(task.workloads, engines, strict=True)
    ]
    rows = [_rows(engine, model) for engine, model in zip(engines, models, strict=True)]
    memory = [(peak_bytes(model, "cpu"), saved_bytes(model)) for model in models]
    clock = work_clock_of("cpu")

    def timed(timer: WorkTimer) -> float:
        dist.barrier()
        return timer()

    hands = {str(number): partial(timed, clock.timer(m.run)) for number, m in enumerate(models)}
    seconds = take_turns(hands, Patience(0, task.turns))
    destroy_groups()
    return [
        Measured(rows[number], seconds[str(number)], *memory[number])
        for number in range(len(models))
    ]


def _rows(engine: Engine, model: BenchContender) -> float:
    """The rows that this rank's experts receive in a pass, over all layers. Collective."""
    engine.statistics.training.clear()
    model.forward()
    layers = engine.statistics.training.reduced([None]).summaries()
    ep = engine.groups.ep
    total = 0.0
    for layer in layers:
        load_E = layer["tokens_per_expert"]
        experts = len(load_E) // ep.size()
        here = slice(ep.rank() * experts, (ep.rank() + 1) * experts)
        total += sum(load_E[here])
    return total


def format_workloads(task: Task, ranks: Sequence[Sequence[Measured]]) -> str:
    """A line for each workload, of the rank that is worst in each column.

    `ranks`: for each rank, the workloads in the order of `task`.
    """
    by_workload = list(zip(*ranks, strict=True))
    first = by_workload[0]
    lines = [_LINE.format(*_HEADS)]
    for workload, measured in zip(task.workloads, by_workload, strict=True):
        rows = [each.rows for each in measured]
        peak = max(each.peak_bytes for each in measured)
        lines.append(
            _LINE.format(
                str(workload),
                f"{max(rows) / statistics.mean(rows):.2f}",
                f"{statistics.median(_slowest(measured)) * 1e3:,.1f}",
                f"{_times(measured, first):.2f}x",
                f"{peak / 2**20:,.1f}",
                f"{peak / max(each.peak_bytes for each in first):.2f}x",
                f"{max(each.saved_bytes for each in measured) / 2**20:,.1f}",
            )
        )
    return "\n".join(lines)


def _slowest(measured: Sequence[Measured]) -> list[float]:
    """For each turn, the seconds of the slowest rank."""
    return [max(turn) for turn in zip(*(each.seconds for each in measured), strict=True)]


def _times(measured: Sequence[Measured], other: Sequence[Measured]) -> float:
    """The median of the ratios of neighboring turns, in which a slow minute cancels."""
    pairs = zip(_slowest(measured), _slowest(other), strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
