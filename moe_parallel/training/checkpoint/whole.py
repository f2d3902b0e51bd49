"""The whole tensors of checkpoints, read on one process, a group at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moe_parallel.training.checkpoint.index import read_index
from moe_parallel.training.checkpoint.tensors import read_whole

READ_AT_ONCE = 256 * 2**20  # bytes; a larger tensor is read alone

Entries: TypeAlias = Mapping[str, TensorStorageMetadata]


def tensor_entries(checkpoint: Path) -> Entries:
    """The dtype and the shape of every tensor, by its key. Raises StorageError."""
    entries = read_index(checkpoint).state_dict_metadata.items()
    return {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


def read_in_groups(
    keys: Iterable[str], entries: Entries, *checkpoints: Path
) -> Iterator[tuple[dict[str, torch.Tensor], ...]]:
    """The tensors with these keys, in the order of the keys: a dict for each checkpoint.

    `entries`: of every checkpoint, which must agree. One group is in memory for each checkpoint
    while the next is not asked for. Raises StorageError if a file cannot be read.
    """
    for group in _groups(sorted(keys), entries):
        yield tuple(_read(group, entries, checkpoint) for checkpoint in checkpoints)


def _read(keys: list[str], entries: Entries, checkpoint: Path) -> dict[str, torch.Tensor]:
    values = {
        key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in keys
    }
    read_whole(values, checkpoint)
    return values


def _groups(keys: list[str], entries: Entries) -> Iterator[list[str]]:
    """The keys in groups of at most READ_AT_ONCE bytes, because each reading parses the index."""
    group: list[str] = []
    size = 0
    for key in keys:
        more = math.prod(entries[key].size) * entries[key].properties.dtype.itemsize
        if group and size + more > READ_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(key)
        size += more
    if group:
        yield group
