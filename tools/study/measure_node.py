"""Measure the CPU hosts of this job, and write the description that `scaling.py --node` reads.

    srun --ntasks-per-node 2 python tools/study/measure_node.py node.json
    torchrun --nproc-per-node 2 tools/study/measure_node.py node.json

Start one rank for each rank that will train: all measure at the same time, because they share the
cores. With one node, the network is described by the links within the node. For CPU hosts only: the
figures of GPU nodes are in moe_parallel/plan/cluster.py.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import psutil
import torch
from torch import distributed as dist

from moe_parallel.errors import InputError
from moe_parallel.launch import slurm
from moe_parallel.plan.cluster import Efficiency, Node
from moe_parallel.tool import Tool, check_positive

SIZE = 512  # of the matrices
COPIED = 32 * 2**20  # bytes, more than the caches of a core
SENT = 2**20  # bytes of an all-to-all
CALLS = 200  # of a small operator


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("file", type=Path, help="the JSON file to write")
    tool.add_argument(
        "--ranks-per-node", metavar="N", type=int, help="ranks of a node (as srun or torchrun says)"
    )
    tool.add_argument(
        "--repeat", metavar="N", type=int, default=20, help="number of measurements (default: 20)"
    )
    return tool.run(arguments, _measure)


def _measure(own: Namespace) -> None:
    if slurm.is_task(os.environ) and "RANK" not in os.environ:
        tasks = os.environ.get("SLURM_NTASKS_PER_NODE", "")
        os.environ.update(slurm.rank_variables(os.environ) | {"LOCAL_WORLD_SIZE": tasks})
    if "RANK" not in os.environ:
        raise InputError("this is not a rank of a job: start it with srun or torchrun")
    if own.ranks_per_node is None:
        own.ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    check_positive(own, "ranks-per-node", "repeat")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        described = describe(own.ranks_per_node, own.repeat)
        if dist.get_rank() == 0:
            own.file.write_text(json.dumps(described, indent=1) + "\n")
            print(own.file)
    finally:
        dist.destroy_process_group()


def describe(ranks_per_node: int, repeat: int) -> dict[str, object]:
    """The fields of Node, and `efficiency`: the shares that the measurements already contain are 1.

    Every rank calls this. Raises InputError if the ranks do not fill nodes.
    """
    world = dist.get_world_size()
    if world % ranks_per_node:
        raise InputError(f"--ranks-per-node is {ranks_per_node}, but the job has {world} ranks")
    nodes = world // ranks_per_node
    within = _group([[node * ranks_per_node + i for i in range(ranks_per_node)]
                     for node in range(nodes)])  # fmt: skip
    across = _group([[node * ranks_per_node + i for node in range(nodes)]
                     for i in range(ranks_per_node)])  # fmt: skip

    def median(work: Callable[[], object]) -> float:
        return _slowest_median(work, repeat)

    fp32, bf16 = (
        2 * SIZE**3 / median(_product(dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    memory_rate = 2 * COPIED / median(_copy())  # read and written
    here = _link(within, ranks_per_node, median)
    there = _link(across, nodes, median)
    rate, latency = here or there or (memory_rate, 0.0)
    network_rate, network_latency = there or (rate, latency)
    node = Node(
        name=f"measured-x{ranks_per_node}",
        gpus=ranks_per_node,
        bf16=bf16,
        fp8=None,
        fp32=fp32,
        memory_size=psutil.virtual_memory().total / ranks_per_node,
        memory_rate=memory_rate,
        link_rate=rate,
        network_rate=network_rate,
        processors=1,
        source=f"measure_node.py, {world} ranks on {nodes} nodes at the same time",
        link_latency=latency,
        network_latency=network_latency,
        call_time=median(_call()) / CALLS,
    )
    shares = {field.name: 1.0 for field in fields(Efficiency)}
    return asdict(node) | {"efficiency": shares}


def _product(dtype: torch.dtype) -> Callable[[], object]:
    one, other = (torch.rand(SIZE, SIZE).to(dtype) for _ in range(2))
    return lambda: one @ other


def _copy() -> Callable[[], object]:
    source = torch.rand(COPIED // 4)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _call() -> Callable[[], object]:
    """Calls of an operator whose result autograd remembers, as those of a layer are."""
    numbers = torch.zeros(8, requires_grad=True)
    return lambda: [numbers + numbers for _ in range(CALLS)]


def _group(all_ranks: list[list[int]]) -> dist.ProcessGroup:
    """The group of this rank; every rank makes all groups."""
    groups = [(ranks, dist.new_group(ranks)) for ranks in all_ranks]
    (own,) = [group for ranks, group in groups if dist.get_rank() in ranks]
    return own


def _link(
    group: dist.ProcessGroup, size: int, median: Callable[[Callable[[], object]], float]
) -> tuple[float, float] | None:
    """Bytes a second that a rank sends to the others of its group, and the time of a small
    collective; None if it has no others."""
    if size == 1:
        return None
    given = torch.zeros(SENT // size * size, dtype=torch.uint8)
    taken, one = torch.empty_like(given), torch.zeros(1)
    sent = len(given) * (size - 1) / size
    rate = sent / median(lambda: dist.all_to_all_single(taken, given, group=group))
    return rate, median(lambda: dist.all_reduce(one, group=group))


def _slowest_median(work: Callable[[], object], repeat: int) -> float:
    """The median of the seconds that `work` takes, of the slowest rank; all ranks work at once."""
    seconds = []
    for _ in range(repeat + 1):
        dist.barrier()
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    found = torch.tensor(statistics.median(seconds[1:]), dtype=torch.float64)  # the first warms up
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
