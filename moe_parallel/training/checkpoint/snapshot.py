"""A snapshot: what a checkpoint of one iteration will contain, and its copy in host memory.

A snapshot refers to the tensors of the model and the optimizer, which training changes. `HostCopy`
copies them. (torch has a stager for this; that of torch 2.11 does not keep its memory, and copies
nothing the second time.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.utils.weak import WeakIdKeyDictionary

from moe_parallel.collective_errors import exchange
from moe_parallel.platform.device import free_host_memory, host_memory_owner, memory_to_regain
from moe_parallel.training.checkpoint.optimizer import STATE_PREFIX
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
    """The memory of a host for a copy of what this rank writes.

    It is kept between copies: allocating it takes longer than copying, and no later copy can then
    run out of memory. With a GPU it is pinned, and is written on a stream of its own, during the
    computation. A new copy overwrites the one before.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._memory = WeakIdKeyDictionary()  # the bytes of the copy of each storage

    def check_memory(self, shards: Shards) -> None:
        """Check that the ranks of each host can copy their shards. Collective.

        Raises:
            NoMemory: on every rank, if a host has too little memory.
        """
        needed = sum(each.nbytes() for each in _storages(shards) if each not in self._memory)
        if needed:  # the next step allocates again what the last one has released
            needed += memory_to_regain()
        ranks = exchange((host_memory_owner(), needed, free_host_memory()))
        for owner in dict.fromkeys(owner for owner, _, _ in ranks):
            total = sum(need for other, need, _ in ranks if other == owner)
            free = min(free for other, _, free in ranks if other == owner)
            if total > free:
                raise NoMemory(
                    f"a copy of the state during training takes {total / 2**30:,.1f} GiB of host "
                    f"memory, and {free / 2**30:,.1f} GiB are free"
                )

    def copy(self, shards: Shards) -> Shards:
        """The shards, with copies of the weights and of the optimizer's state."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # None: nothing changes
            for storage in _storages(shards):
                self._bytes_of(storage).copy_(_as_bytes(storage), non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        copied = {
            key: [replace(each, data=self._view(each.data)) for each in of_key]
            for key, of_key in shards.main.items()
            if _only_updates_change(of_key[0])
        }
        return replace(shards, main=shards.main | copied)

    def _bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The memory for the copy of a storage."""
        if storage not in self._memory:
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8)
            if self._stream is not None and len(memory):
                _pin(memory)
            self._memory[storage] = memory
        found: torch.Tensor = self._memory[storage]
        return found

    def _view(self, data: torch.Tensor) -> torch.Tensor:
        """The same part of the copy of a tensor's storage."""
        memory = self._bytes_of(data.untyped_storage()).untyped_storage()
        copied = torch.empty(0, dtype=data.dtype)
        return copied.set_(memory, data.storage_offset(), data.size(), data.stride())


def _pin(memory: torch.Tensor) -> None:
    """Pin memory in place. torch's own pinned memory has the size of the next power of two."""
    pin_memory(memory.data_ptr(), len(memory))
    end = weakref.finalize(memory.untyped_storage(), unpin_memory, memory.data_ptr())
    end.atexit = False  # the process ends, and CUDA may be gone


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def with_own_buffers(shards: Shards) -> Shards:
    """The shards, with copies of buffers and objects, which a forward pass may change; small."""
    own = {
        key: [replace(each, data=_copy(each.data)) for each in of_key]
        for key, of_key in shards.main.items()
        if not _only_updates_change(of_key[0])
    }
    return replace(shards, main=shards.main | own)


def _only_updates_change(shard: Any) -> bool:
    """Whether only an optimizer step changes it: a weight, or a part of the optimizer's state."""
    return isinstance(shard, ShardedTensor) and (
        shard.data.requires_grad or shard.key.startswith(STATE_PREFIX)
    )


def _copy(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.detach().to("cpu", copy=True)
    return deepcopy(data)


def _storages(shards: Shards) -> Iterator[torch.UntypedStorage]:
    """The storages of weights and optimizer state that this rank writes, each once."""
    found = {}
    for each in (each for of_key in shards.main.values() for each in of_key):
        if _only_updates_change(each):
            storage = each.data.untyped_storage()
            found[id(storage)] = storage
    yield from found.values()
