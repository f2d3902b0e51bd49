"""Comparison of two checkpoints, tensor by tensor and to the bit, on one process."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from moe_parallel.training.checkpoint.index import read_index
from moe_parallel.training.checkpoint.tensors import read_whole

READ_AT_ONCE = 256 * 2**20  # bytes; a larger tensor is read alone
COMPARED_AT_ONCE = 2**22  # values


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in both checkpoints, and how it differs."""

    key: str
    how: str


@dataclass(frozen=True)
class Comparison:
    """equal: the number of tensors that are the same to the bit."""

    equal: int
    differences: list[Difference]  # in the order of the model's layers


def compare(one: Path, other: Path) -> Comparison:
    """Compares all tensors of two checkpoints: weights, Adam's moments, and master weights.

    The random states are not compared: each rank has its own. Two groups of tensors are in memory
    at a time. Raises StorageError if a file cannot be read.
    """
    first, second = _entries(read_index(one)), _entries(read_index(other))
    differences = []
    for key in first.keys() ^ second.keys():
        where = one if key in first else other
        differences.append(Difference(key, f"only in {where}"))
    shared = []
    for key in first.keys() & second.keys():
        kinds = [f"{_name(e.properties.dtype)} {list(e.size)}" for e in (first[key], second[key])]
        if kinds[0] == kinds[1]:
            shared.append(key)
        else:
            differences.append(Difference(key, f"{kinds[0]} and {kinds[1]}"))
    equal = 0
    for keys in _groups(sorted(shared), first):
        values, others = ({key: _empty(first[key]) for key in keys} for _ in range(2))
        read_whole(values, one)
        read_whole(others, other)
        found = [
            Difference(key, how)
            for key in keys
            if (how := how_values_differ(values[key], others[key]))
        ]
        equal += len(keys) - len(found)
        differences += found
    differences.sort(key=lambda difference: _natural(difference.key))
    return Comparison(equal, differences)


def _entries(index: Metadata) -> dict[str, TensorStorageMetadata]:
    entries = index.state_dict_metadata.items()
    return {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _empty(entry: TensorStorageMetadata) -> torch.Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _groups(keys: list[str], entries: dict[str, TensorStorageMetadata]) -> Iterator[list[str]]:
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


def how_values_differ(one: torch.Tensor, other: torch.Tensor) -> str | None:
    """How the values differ; None: they are the same to the bit, also if they are NaN."""
    count, largest = 0, 0.0
    bytes_of_value = one.element_size()
    for a, b in zip(*(x.reshape(-1).split(COMPARED_AT_ONCE) for x in (one, other)), strict=True):
        differs = (a.view(torch.uint8) != b.view(torch.uint8)).view(-1, bytes_of_value).any(1)
        if differs.any():
            count += int(differs.sum())
            apart = (a[differs].double() - b[differs].double()).abs()
            largest = max(largest, apart.nan_to_num(0, posinf=0).max().item())
    if count == 0:
        return None
    return f"{count:,} of {one.numel():,} values, largest difference {largest:.2e}"


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """A key for sorting in which layer 10 comes after layer 9."""
    words = re.split(r"(\d+)", key)
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in words]
