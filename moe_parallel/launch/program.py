"""The roles of a process: the launcher, one of many ranks, or the whole job.

Whatever can be reported without torch (help, wrong flags, wrong values) is reported at once.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from moe_parallel.config import Config, parse_command_line, read_command_line, validate
from moe_parallel.config.parser import LaunchOptions, divide
from moe_parallel.errors import InputError, Unmet
from moe_parallel.training.signals import (
    EXIT_BAD_INPUT,
    EXIT_LOST,
    Stopped,
    StopRequest,
    code_of,
    reader_gone,
)

if TYPE_CHECKING:
    from moe_parallel.tool import Tool

Check = Callable[[LaunchOptions], object]
Work = Callable[[Sequence[str], StopRequest], int]


def main(script: str, arguments: Sequence[str]) -> None:
    """Pretrain, and end the process with the exit code; see `training.signals`."""
    if {"--help", "-h"} & set(arguments):
        _run(lambda stop: _help(arguments))
    # For starts.jsonl; a rank has that of its launcher.
    os.environ.setdefault("MOE_PARALLEL_COMMAND", shlex.join(["python", script, *arguments]))
    _run(lambda stop: _take_role(script, arguments, _check, _pretrain, stop))


def run_tool_on_ranks(
    tool: Tool,
    script: str,
    arguments: list[str],
    check: Callable[[Namespace, list[str]], object],
    work: Callable[[Sequence[str]], int],
) -> int:
    """Run `work(arguments)` on every rank, and end the process with the exit code of the job.

    Args:
        script: the program's file.
        arguments: of the program; those of the launcher are taken out.
        check: called before torch is imported, with the tool's flags and those of the training
            program; raises InputError.
        work: called on each rank when torch.distributed is initialized; returns the exit code.

    Returns only after --help, with the exit code.
    """
    if {"-h", "--help"} & set(arguments):
        return tool.run(arguments, lambda own: None)

    def check_words(options: LaunchOptions) -> None:
        check(*tool.divide(options.program))

    def on_ranks(words: Sequence[str], stop: StopRequest) -> int:
        _work_with_groups(lambda: work(words), stop)

    _run(lambda stop: _take_role(script, arguments, check_words, on_ranks, stop))
    return 0


def _run(role: Callable[[StopRequest], int]) -> None:
    """End the process with the exit code of a role; an error of the user is one line."""
    stop = StopRequest()
    try:
        with stop.listening():
            code = role(stop)
    except InputError as error:
        code = EXIT_BAD_INPUT
        _tell(f"error: {error}")
    except Unmet as error:
        code = EXIT_LOST
        _tell(f"error: {error}")
    except Stopped as stopped:
        code = code_of(stopped)
        _tell(str(stopped))
    except BrokenPipeError:
        code = reader_gone()
    sys.exit(code)


def _take_role(
    script: str, arguments: Sequence[str], check: Check, work: Work, stop: StopRequest
) -> int:
    options = divide(arguments)
    if options.flag is not None:
        _check_alone(options.flag)
    check(options)
    # No C++ stack traces when a store or a rank is gone: our own message has the line needed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if options.flag is not None:
        from moe_parallel.launch.launcher import Launcher
        from moe_parallel.training.failure import leave

        leave(Launcher(options, script).run())
    if is_task(os.environ) and "RANK" not in os.environ:
        os.environ.update(rank_variables(os.environ))
        _warn_without_srun()
    from moe_parallel.platform.megatron import import_megatron

    import_megatron()
    return work(options.program, stop)


def _check_alone(flag: str) -> None:
    """Raise InputError for a launcher among processes that torchrun or srun has started."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError(
            f"{flag} is for a start without torchrun, which has started this process: give it to "
            "torchrun alone"
        )
    if is_task(os.environ) and "SLURM_STEP_ID" in os.environ:
        raise InputError(
            f"{flag} is for a start on one node, and srun has started "
            f"{tasks(os.environ)} tasks: leave it out, and let srun start every rank "
            "(--ntasks-per-node)"
        )


def _pretrain(arguments: Sequence[str], stop: StopRequest) -> int:
    from moe_parallel.training.pretrain import main as pretrain

    return pretrain(arguments, stop)


def _work_with_groups(work: Callable[[], int], stop: StopRequest) -> NoReturn:
    """Initialize torch.distributed and call `work`; ends the process with its exit code."""
    from moe_parallel.collective_errors import StorageError
    from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu
    from moe_parallel.platform.device import default_backend, take_gpu
    from moe_parallel.training.failure import (
        MEETING,
        FailureChannel,
        connect_ranks,
        run,
    )

    def body(channel: FailureChannel) -> int:
        if default_backend() == "nccl":
            take_gpu(int(os.environ.get("LOCAL_RANK", 0)))
        else:
            adapt_megatron_to_cpu()
        channel.watch()
        connect_ranks(channel.store, default_backend(), MEETING)
        try:
            return work()
        except StorageError as error:
            raise InputError(str(error)) from error

    run(body, stop)


def _check(options: LaunchOptions) -> None:
    """Check a configuration before ranks are started. The ranks check it themselves."""
    launches = options.flag is not None
    if not launches and ("RANK" in os.environ or is_task(os.environ)):
        return
    line = read_command_line(options.program)
    if line.file is not None and line.file.is_fifo():
        raise InputError(f"--config {line.file} is a pipe, and each rank reads it: name a file")
    config = None  # that of a checkpoint is read by the ranks
    if line.file is not None or "load" not in line.given:
        config = parse_command_line(options.program)
        if options.processes.isdecimal():
            validate(config, int(options.processes))
    if options.max_restarts:
        _check_restarts(options, config, line.given)


def _check_restarts(
    options: LaunchOptions, config: Config | None, given: Mapping[str, Any]
) -> None:
    if config is None:
        load, save = given["load"], given.get("save", given["load"])
    else:
        load, save = config.checkpoint.load, config.checkpoint.save
    if save is None or load is None or os.path.realpath(load) != os.path.realpath(save):
        raise InputError(
            f"--max-restarts {options.max_restarts} continues from the newest checkpoint: name one "
            "folder by --save and by --load"
        )


def _help(arguments: Sequence[str]) -> int:
    if _is_first():
        with suppress(SystemExit):
            read_command_line(arguments)
    return 0


def _warn_without_srun() -> None:
    if os.environ["RANK"] == "0" and "SLURM_STEP_ID" not in os.environ:
        others = tasks(os.environ) - 1
        _tell(
            f"warning: this is task 0 of a Slurm job, and waits for {others} more: start them all "
            "by srun, or one process by --nproc-per-node 1"
        )


def _is_first() -> bool:
    """Whether this process prints for the job until its processes have found each other."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) == 0


def _tell(message: str) -> None:
    if _is_first():
        print(message, file=sys.stderr, flush=True)


# Ranks that srun starts: Slurm's variables of a task become those of torchrun.

_PORTS = range(20_000, 30_000)  # below the ports that systems assign to connections


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that srun started."""
    return "SLURM_PROCID" in environment and tasks(environment) > 1


def tasks(environment: Mapping[str, str]) -> int:
    """The number of processes that srun started."""
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    return int(next((environment[name] for name in names if name in environment), "1"))


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a task. MASTER_ADDR and MASTER_PORT stay if they are set."""
    one_gpu_each = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1"
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks(environment)),
        # A process uses the GPU of its local number, unless each task sees only its own GPU.
        "LOCAL_RANK": "0" if one_gpu_each else environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port(environment)),
    }


def first_host(environment: Mapping[str, str]) -> str:
    """The node of task 0: `gpu[07-09,12],cpu1` begins with gpu07."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environment[name] for name in names if environment.get(name)), "localhost")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)


def port(environment: Mapping[str, str]) -> int:
    """A port that is the same for every task of a step, and most likely unique on the node."""
    job, step = (
        int(digits[0]) if (digits := re.match(r"\d+", environment.get(name, ""))) else 0
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    return _PORTS[(17 * job + step) % len(_PORTS)]
