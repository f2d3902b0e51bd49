"""A tool on the ranks of a job: it starts them, or is one of them, as pretrain_gpt_moe.py does."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import NoReturn

from moe_parallel.config.launching import divide
from moe_parallel.errors import InputError, Unmet
from moe_parallel.launch import slurm
from moe_parallel.tool import Tool
from moe_parallel.training.signals import EXIT_BAD_INPUT, EXIT_LOST, Stopped, StopRequest, code_of


def run_on_ranks(
    script: str,
    arguments: Sequence[str],
    check: Callable[[Sequence[str]], object],
    work: Callable[[Sequence[str]], int],
) -> NoReturn:
    """Run `work(arguments)` on every rank, and end the process with the exit code of the job.

    Args:
        script: the program's file.
        arguments: of the program; those of the launcher are taken out.
        check: called with the arguments before torch is imported; raises InputError.
        work: called on each rank when torch.distributed is initialized; returns the exit code.
    """
    stop = StopRequest()
    try:
        with stop.listening():
            options = divide(arguments)
            check(options.program)
            if options.launcher:
                _launch(script, arguments, stop)
            if slurm.is_task(os.environ) and "RANK" not in os.environ:
                os.environ.update(slurm.rank_variables(os.environ))
            _be_rank(options.program, work, stop)
    except InputError as error:
        _tell(f"error: {error}")
        _leave(EXIT_BAD_INPUT)
    except Unmet as error:
        _tell(f"error: {error}")
        _leave(EXIT_LOST)
    except Stopped as stopped:
        _tell(str(stopped))
        _leave(code_of(stopped))


def run_tool_on_ranks(
    tool: Tool,
    script: str,
    arguments: list[str],
    check: Callable[[Namespace, list[str]], object],
    work: Callable[[Sequence[str]], int],
) -> int:
    """The same for a tool. `check` is called with its own flags and those of the training program.

    Returns only after --help, with the exit code.
    """
    if {"-h", "--help"} & set(arguments):
        return tool.run(arguments, lambda own: None)
    run_on_ranks(script, arguments, lambda words: check(*tool.divide(words)), work)


def _launch(script: str, arguments: Sequence[str], stop: StopRequest) -> NoReturn:
    options = divide(arguments)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError(
            f"{options.launcher[0]} is for a start without torchrun, which has started this "
            "process: give it to torchrun alone"
        )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from moe_parallel.launch.job import run_job
    from moe_parallel.training.failure import leave

    leave(run_job(options, script, stop))


def _be_rank(
    arguments: Sequence[str], work: Callable[[Sequence[str]], int], stop: StopRequest
) -> NoReturn:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from moe_parallel.collective_errors import StorageError
    from moe_parallel.platform.import_megatron import import_megatron
    from moe_parallel.training.failure import (
        LAUNCHER,
        MEETING,
        FailureChannel,
        connect_ranks,
        join_store,
        leave_with_launcher,
        run,
    )

    if LAUNCHER in os.environ:
        leave_with_launcher(int(os.environ[LAUNCHER]), stop)
    import_megatron()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = join_store(rank, world_size)

    def body(channel: FailureChannel) -> int:
        from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu
        from moe_parallel.platform.device import default_backend, take_gpu

        if default_backend() == "nccl":
            take_gpu(int(os.environ.get("LOCAL_RANK", 0)))
        else:
            adapt_megatron_to_cpu()
        channel.watch()
        connect_ranks(default_backend(), store, rank, world_size, MEETING)
        try:
            return work(arguments)
        except StorageError as error:
            raise InputError(str(error)) from error

    run(body, FailureChannel(store), stop)


def _leave(code: int) -> NoReturn:
    sys.exit(code)


def _tell(message: str) -> None:
    if int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) == 0:
        print(message, file=sys.stderr, flush=True)
