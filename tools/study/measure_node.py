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
import sys
from argparse import Namespace
from pathlib import Path

import torch
from node_speed import describe
from torch import distributed as dist

from moe_parallel.errors import InputError
from moe_parallel.launch import slurm
from moe_parallel.tool import Tool, check_positive


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
