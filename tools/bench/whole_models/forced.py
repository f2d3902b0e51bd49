"""Our model with forced routing and its experts divided over the ranks of a world."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from moe_parallel.config import ParallelConfig
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu
from moe_parallel.training.engine import Engine
from tools.bench.clock import WorkTimer, work_clock_of
from tools.bench.contender import BenchContender
from tools.bench.measurement import Patience, take_turns
from tools.bench.memory import peak_bytes, saved_bytes
from tools.bench.whole_models.model import ModelTerms
from tools.bench.whole_models.ours import engine_of, model_of
from tools.bench.whole_models.sizes import ModelSize
from tools.bench.workloads import Measured, Task

SEED = 1
TIMEOUT = timedelta(minutes=10)


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
        model_of(str(each), engine, terms)
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
