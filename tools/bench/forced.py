"""A model under forced routing, with its experts divided over the ranks of a world."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from moe_parallel.config import ParallelConfig
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu
from moe_parallel.platform.megatron import suppress_warnings
from moe_parallel.training.engine import Engine
from tools.bench.measurement import (
    BenchContender,
    Patience,
    WorkTimer,
    peak_bytes,
    saved_bytes,
    take_turns,
    work_clock_of,
)
from tools.bench.sizes import ModelSize
from tools.bench.whole_models import ModelTerms, engine_model, engine_of

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


def measure_on_ranks(task: Task, ranks: int) -> list[list[Measured]]:
    """The measurements of every rank, each in a process of its own."""
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(ranks, get_context("spawn"), suppress_warnings) as pool,
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
