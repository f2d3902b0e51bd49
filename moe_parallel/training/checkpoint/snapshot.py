"""A snapshot: what a checkpoint of one iteration will contain, and its copy in host memory.

A snapshot refers to the tensors of the model and the optimizer, which the next step changes. A
`HostCopy` copies it into memory of its own, by torch's stager for asynchronous checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.weak import WeakIdKeyDictionary

from moe_parallel.collective_errors import exchange
from moe_parallel.platform.memory import free_host_memory, host_memory_owner, memory_to_regain
from moe_parallel.training.checkpoint.tensors import Shards


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of a checkpoint that is to be written."""

    iteration: int
    shards: Shards
    adam_step: int | None  # 0: this rank updates nothing; None: there is no optimizer
    record: dict[str, Any]  # the fields of checkpoint.json, see record.py, except the files


class NoMemory(Exception):
    """The host has too little memory for a copy of the state. The message is one line."""


class HostCopy:
    """The memory of a host for copies of snapshots, one at a time.

    It is kept between copies: allocating it takes longer than copying, and later copies then
    cannot run out of memory. With a GPU it is pinned. A new copy overwrites the one before.
    """

    def __init__(self) -> None:
        with_gpu = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=with_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=with_gpu,
            )
        )
        self._copied = WeakIdKeyDictionary()  # the storages for which the stager has memory

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with tensors and objects of its own, in host memory. Collective.

        Raises:
            NoMemory: on every rank, if the ranks on one host need more memory than is free there.
        """
        storages = list(_storages(snapshot.shards))
        self._check_memory(sum(s.nbytes() for s in storages if s not in self._copied))
        main = {
            key: [_detached(each) for each in of_key]
            for key, of_key in snapshot.shards.main.items()
        }
        copied = cast(dict[str, list[Any]], self._stager.stage(main))
        for storage in storages:
            self._copied[storage] = None
        return replace(snapshot, shards=replace(snapshot.shards, main=copied))

    def _check_memory(self, needed: int) -> None:
        # Between two steps the memory of the activations is free, but the next step needs it.
        need = needed and needed + memory_to_regain()
        ranks = exchange((host_memory_owner(), need, free_host_memory()))
        for owner in dict.fromkeys(owner for owner, _, _ in ranks):
            total = sum(need for other, need, _ in ranks if other == owner)
            free = min(free for other, _, free in ranks if other == owner)
            if total > free:
                raise NoMemory(
                    f"a copy of the state, beside training, takes {total / 2**30:,.1f} GiB of host "
                    f"memory, and {free / 2**30:,.1f} GiB are free"
                )


def _storages(shards: Shards) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors that this rank writes, each once."""
    found = {}
    for each in (each for of_key in shards.main.values() for each in of_key):
        if isinstance(each, ShardedTensor):
            storage = each.data.untyped_storage()
            found[id(storage)] = storage
    yield from found.values()


def _detached(shard: Any) -> Any:
    """Without the attributes of a parameter, such as its gradient, which the stager copies too."""
    return replace(shard, data=shard.data.detach()) if isinstance(shard, ShardedTensor) else shard
