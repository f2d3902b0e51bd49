"""A minimal job: `python small_job.py --nproc-per-node 2 ... WHAT [RANK]`.

It is launched as the program is. Its ranks have a store, a process group, and steps that sum a
value with a collective. Rank 0 prints `step N`. WHAT names a function of this file; rank RANK
calls it in step 3 of the first start, which is recorded in the folder.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the program does

import torch
from torch import distributed as dist

from moe_parallel.config.parser import divide
from moe_parallel.errors import InputError
from moe_parallel.launch.launcher import Launcher
from moe_parallel.training.failure import FailureChannel, join_store, leave, run
from moe_parallel.training.signals import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    Stopped,
    StopRequest,
    code_of,
)

STEPS = 6


def wait(stop: StopRequest) -> None:
    """Wait for a signal; the other ranks wait in their collective."""
    print("rank waits", flush=True)
    while stop.signal is None:
        time.sleep(0.02)


def bad_input(stop: StopRequest) -> None:
    raise InputError("--flag is 3: it must be 4")


def die(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_rank(what: str, where: int) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first_start = not os.path.exists("started")
    stop = StopRequest()

    def body(channel: FailureChannel) -> int:
        channel.watch()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("groups", join), rank=rank, world_size=world_size,
            timeout=timedelta(minutes=10),
        )  # fmt: skip
        dist.barrier()
        with stop.finishing(lambda: "in a step; nothing was saved"):
            for step in range(1, STEPS + 1):
                if step == 3 and rank == where and first_start:
                    open("started", "w").close()
                    globals()[what](stop)
                asked = torch.tensor(float(stop.signal is not None))
                dist.all_reduce(asked)
                if asked > 0:
                    dist.barrier()
                    return EXIT_INTERRUPTED
                if rank == 0:
                    print(f"step {step}", flush=True)
        dist.barrier()
        return 0

    join = join_store(rank, world_size)
    run(body, FailureChannel(join), stop)


def main(arguments: Sequence[str]) -> int:
    stop = StopRequest()
    try:
        with stop.listening():
            return Launcher(divide(arguments), __file__).run()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return code_of(stopped)


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_rank(sys.argv[1], int(sys.argv[2]))
    leave(main(sys.argv[1:]))
