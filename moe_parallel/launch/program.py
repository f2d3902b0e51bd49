"""The roles of a process of pretrain_gpt_moe.py: the launcher, one of many ranks, or the whole job.

Whatever can be reported without torch (help, wrong flags, wrong values) is reported at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from moe_parallel.config import Config, parse_command_line, read_command_line, validate
from moe_parallel.config.launching import LaunchOptions, divide
from moe_parallel.errors import InputError, Unmet
from moe_parallel.launch import slurm
from moe_parallel.training.signals import (
    EXIT_BAD_INPUT,
    EXIT_LOST,
    Stopped,
    StopRequest,
    code_of,
    reader_gone,
)
from moe_parallel.training.starts import keep_command


def main(script: str, arguments: Sequence[str]) -> None:
    """Run the program, and end the process with its exit code; see `training.signals`."""
    stop = StopRequest()
    try:
        with stop.listening():
            code = _run(script, arguments, stop)
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


def _run(script: str, arguments: Sequence[str], stop: StopRequest) -> int:
    if {"--help", "-h"} & set(arguments):
        return _help(arguments)
    keep_command(script, arguments)
    options = divide(arguments)
    if options.launcher:
        _launch(options, script, stop)
    if slurm.is_task(os.environ) and "RANK" not in os.environ:
        os.environ.update(slurm.rank_variables(os.environ))
        _warn_without_srun()
    elif "RANK" not in os.environ:
        _check(_config(options.program), 1)
    return _be_rank(options.program, stop)


def _be_rank(arguments: Sequence[str], stop: StopRequest) -> int:
    _silence_torch()
    from moe_parallel.training.failure import LAUNCHER, leave_with_launcher

    if LAUNCHER in os.environ:
        leave_with_launcher(int(os.environ[LAUNCHER]), stop)
    from moe_parallel.platform.import_megatron import import_megatron

    import_megatron()
    from moe_parallel.training.pretrain import main as pretrain

    return pretrain(arguments, stop)


def _launch(options: LaunchOptions, script: str, stop: StopRequest) -> NoReturn:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError(
            f"{options.launcher[0]} is for a start without torchrun, which has started this "
            "process: give it to torchrun alone"
        )
    config = _config(options.program)
    if slurm.is_task(os.environ) and options.nodes is None:
        # srun has started one launcher on each node.
        options = replace(options, launcher=(*slurm.launcher_words(os.environ), *options.launcher))
    elif options.nodes in (None, "1") and (options.processes or "1").isdecimal():
        _check(config, int(options.processes or "1"))
    if options.max_restarts:
        _check_restarts(options, config)
    _silence_torch()
    from moe_parallel.launch.job import run_job
    from moe_parallel.training.failure import leave

    leave(run_job(options, script, stop))


def _silence_torch() -> None:
    """No C++ stack traces when a store or a rank is gone: our own message has the line needed."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _config(arguments: Sequence[str]) -> Config | None:
    """The configuration of a command line; None if it is in the checkpoint of --load."""
    line = read_command_line(arguments)
    if line.file is not None and line.file.is_fifo():
        raise InputError(f"--config {line.file} is a pipe, and each rank reads it: name a file")
    if line.file is None and "load" in line.given:
        return None
    return parse_command_line(arguments)


def _check(config: Config | None, world_size: int) -> None:
    """Check the configuration before the ranks are started; the ranks check it again."""
    if config is not None:
        validate(config, world_size)


def _check_restarts(options: LaunchOptions, config: Config | None) -> None:
    if config is None:
        given = read_command_line(options.program).given
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
        others = slurm.tasks(os.environ) - 1
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
