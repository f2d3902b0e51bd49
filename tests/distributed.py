"""Run a function on several processes that share a gloo process group.

    def body(size):                      # at module level, so that it can be pickled
        return torch.distributed.get_rank() * size

    assert run_distributed(2, body, 10) == [0, 10]

The processes are forked from a server that has already imported torch, Megatron-Core and
moe_parallel. Therefore only the first world of a test session waits for those imports.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu

PRELOADED = ["tests.preloaded"]


def run_distributed(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 300,
    prepare: Callable[[], None] = adapt_megatron_to_cpu,
) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks; returns the results, ordered by rank.

    Each rank has a default gloo process group, one thread, no GPU, and torchrun's RANK,
    LOCAL_RANK and WORLD_SIZE. `prepare()` is called before the group is created. Both
    functions, the arguments and the results are pickled.

    Raises:
            RankError: with the traceback of the first rank that failed. The other ranks are ended.
            TimeoutError: some ranks did not finish within `timeout` seconds. All ranks are ended.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task = pickle.dumps((prepare, function, args))
    ranks = []
    try:
        for rank in range(world_size):
            ranks.append(_Rank(rank, world_size, store.port, timeout, task))
        return _collect(ranks, time.monotonic() + timeout)
    finally:
        for member in ranks:
            member.end()


class RankError(AssertionError):
    """A rank raised an exception, or died; the message contains its traceback."""


class _Rank:
    """One process of a world, and the pipe through which it sends its result."""

    def __init__(self, rank: int, world_size: int, port: int, timeout: float, task: bytes) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.rank = rank
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_run_rank, args=(theirs, rank, world_size, port, timeout, task)
        )
        # The server keeps the environment in which it starts: that of the first rank.
        environment = {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        with mock.patch.dict(os.environ, environment):
            self.process.start()
        theirs.close()  # the rank has the only other end, so its death closes the pipe

    def result(self) -> Any:
        """The value that the rank returned; raises RankError if the rank failed."""
        try:
            succeeded, value = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join()
            raise RankError(f"rank {self.rank} died: exit code {self.process.exitcode}") from None
        if not succeeded:
            raise RankError(f"rank {self.rank} failed:\n{value}")
        return value

    def end(self) -> None:
        """End the rank and its children, if it has any; the rank has nothing left to do."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()  # it had no process group of its own yet
        self.process.join()
        self.pipe.close()


def _collect(ranks: list[_Rank], deadline: float) -> list[Any]:
    waiting = {member.pipe: member for member in ranks}
    results: dict[int, Any] = {}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(member.rank for member in waiting.values())
            raise TimeoutError(f"ranks {late} of {len(ranks)} were not done in time")
        for pipe in ready:
            member = waiting.pop(pipe)
            results[member.rank] = member.result()
    return [results[rank] for rank in range(len(ranks))]


def _run_rank(
    pipe: Connection, rank: int, world_size: int, port: int, timeout: float, task: bytes
) -> None:
    os.setpgrp()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        torch.set_num_threads(1)
        prepare, function, args = pickle.loads(task)
        prepare()
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        answer = pickle.dumps((True, function(*args)))
    except BaseException:  # SystemExit too: the caller must receive it
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)
    # Peers may be in the middle of a collective; an exit now would give them errors of their
    # own. The caller ends every rank when it has all answers. If the caller dies, the pipe closes.
    pipe.poll(None)
