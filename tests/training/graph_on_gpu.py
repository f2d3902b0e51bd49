"""Trains tiny models on a GPU, launched and as a CUDA graph, and prints both as JSON.

    python -m tests.training.graph_on_gpu '{"aoe": {"expert_selection": "aoe"}}'

The first argument has the options of each model. It is a program, because the processes in which
other tests train have no GPU.
"""

import json
import os
import sys
from pathlib import Path

from moe_parallel.platform.megatron import suppress_warnings

suppress_warnings()  # before Megatron-Core is imported

import torch  # noqa: E402
from torch import distributed as dist  # noqa: E402

from moe_parallel.platform.gradients import replace_gradient_loops  # noqa: E402
from tests.training.tiny_run import Layout, TinyRun  # noqa: E402

STEPS = 6
GRAPH = {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 2}


def trained(options):
    """The loss and gradient norm of each step, and the routing of all."""
    run = TinyRun(Layout(), Path(), options={"moe_backend": "native"} | options)
    measured = run.steps(STEPS)
    routing = run.engine.statistics.training.summaries()
    run.close()
    return {"steps": measured, "routing": routing}


def main(models):
    replace_gradient_loops()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    torch.cuda.set_device(0)
    found = {
        name: {"launched": trained(options), "replayed": trained(options | GRAPH)}
        for name, options in models.items()
    }
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
