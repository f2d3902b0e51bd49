"""A job: starts the ranks of a node with this program's own launcher and waits for their end."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Sequence
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
import torch.distributed.run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from moe_parallel.config.launching import LaunchOptions
from moe_parallel.errors import InputError
from moe_parallel.launch.agent import JobAgent
from moe_parallel.training.signals import StopRequest


def run_job(options: LaunchOptions, script: str, stop: StopRequest) -> int:
    """Start `script` on the ranks of this node; returns the exit code of the job.

    End the process with it by `training.failure.leave`. Threads that wait for the store in C++,
    ours and torch's, would abort a process whose interpreter ends.

    Raises InputError for a wrong flag of the launcher, and Stopped for a signal that comes before
    the ranks exist.
    """
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # torch's agent would add its own messages to a rank's line
    config, command = _configuration(options, script)
    spec = _spec(config, command)
    assert config.logs_specs is not None
    agent = JobAgent(spec, config.logs_specs, options.shutdown_timeout, stop)
    try:
        agent.run()
    except RendezvousError as error:
        agent.end_without_others(error)
    spec.rdzv_handler.shutdown()
    return agent.exit_code


def _configuration(options: LaunchOptions, script: str) -> tuple[LaunchConfig, Sequence[str]]:
    """torchrun's configuration for these flags, and the command of a rank."""
    try:
        args = torchrun.parse_args([*options.launcher, script, *options.program])
        has_port = "--master-port" in options.launcher or "PET_MASTER_PORT" in os.environ
        _choose_rendezvous(args, has_port)
        _share_cores(torchrun.determine_local_world_size(args.nproc_per_node))
        if not (
            args.log_dir or args.local_ranks_filter or (args.tee, args.redirects) != ("0", "0")
        ):
            args.log_dir = os.devnull  # otherwise torchrun leaves a folder in /tmp
        config, python, words = torchrun.config_from_args(args)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise InputError(f"launching: {' '.join(str(error).split())[:300]}") from error
    assert isinstance(python, str)
    return config, [python, *words]


def _choose_rendezvous(args: Any, has_port: bool) -> None:
    """Choose the rendezvous as torchrun does since 2.13; without one, a node starts alone."""
    _, nodes = torchrun.parse_min_max_nnodes(args.nnodes)
    named = args.rdzv_endpoint or has_port
    if args.standalone or (args.rdzv_backend == "static" and not named and nodes == 1):
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id, args.local_addr = uuid.uuid4().hex, args.local_addr or "localhost"
    if args.master_port is None:
        args.master_port = 29500
    if args.max_restarts and args.rdzv_backend == "static":
        raise InputError(
            f"--max-restarts {args.max_restarts} needs nodes that can meet again: use "
            "--rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME"
        )


def _share_cores(processes: int) -> None:
    """Divide the node's cores between the ranks, unless the user has done so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // processes)))


def _spec(config: LaunchConfig, command: Sequence[str]) -> WorkerSpec:
    """The worker specification, as in torch.distributed.launcher.api."""
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    try:
        handler = rendezvous_registry.get_rendezvous_handler(parameters)
    except (RendezvousError, ValueError) as error:
        raise InputError(
            f"--rdzv-endpoint {config.rdzv_endpoint}: nodes cannot meet there "
            f"({' '.join(str(error).split())[:200]}) on {socket.gethostname()}"
        ) from error
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        numa_options=config.numa_options,
    )
