"""The store through which the ranks of a job find each other and agree on its one error."""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta

import torch.distributed as dist

from moe_parallel.errors import InputError, Unmet

#: Set by our own launcher: its process id.
LAUNCHER = "MOE_PARALLEL_LAUNCHER"
#: Set by our own launcher or a job script: when the job began, in seconds since 1970.
STARTED = "MOE_PARALLEL_STARTED"
#: How long ranks wait for each other; torch's own limit.
MEETING = timedelta(minutes=30)


def join_store(rank: int, world_size: int, timeout: timedelta = MEETING) -> dist.Store:
    """The store that a launcher or rank 0 serves, or a new store for a single process.

    Launchers that restart the ranks after a failure keep their store. Each start has separate keys
    in it, because the keys of earlier ranks lead to addresses that are no longer served. If rank 0
    serves the store, it waits for the others for `timeout`.

    Raises:
        InputError: the store cannot be reached.
        Unmet: this rank serves the store, and not all others have come in time.
    """
    if "RANK" not in os.environ:  # MASTER_ADDR may be set for other jobs of the same script
        return dist.HashStore()
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    except dist.DistNetworkError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
        raise InputError(
            f"MASTER_ADDR:MASTER_PORT is {place}, where the ranks cannot connect "
            f"({' '.join(str(error).split())[:200]}): choose a host that all reach and a free port"
        ) from error
    except dist.DistStoreError as error:
        raise Unmet(_unmet(rank, str(error))) from error
    return of_this_start(store, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def of_this_start(store: dist.Store, restart: str) -> dist.Store:
    """The part of a launcher's store for the ranks that it has started after so many restarts."""
    return dist.PrefixStore(f"attempt_{restart}", store)


def connect_ranks(
    backend: str,
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    limited_by: str = "minutes:",
) -> None:
    """Initialize torch.distributed, whose default group has all ranks of the job. Collective.

    Raises Unmet if the other ranks have not come within `timeout`, which every collective has.
    `limited_by`: the flag that sets it, for the message.
    """
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("groups", store), rank=rank,
            world_size=world_size, timeout=timeout,
        )  # fmt: skip
    except RuntimeError as error:  # of the store, or of gloo, which connects the ranks
        if re.search("time(d )?out", str(error), re.IGNORECASE) is None:
            raise
        limit = f"{limited_by} {timeout.total_seconds() / 60:.3g}"
        raise Unmet(_unmet(rank, f"{limit}: {error}")) from error


def _unmet(rank: int, why: str) -> str:
    return (
        f"rank {rank} on {socket.gethostname()} has waited in vain for other ranks to start "
        f"({' '.join(why.split())[:200]}): one is slow, stopped, lost with its host, or out of "
        "reach (firewall, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); start again"
    )
