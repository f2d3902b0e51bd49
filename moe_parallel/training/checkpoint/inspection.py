"""Checkpoints for a user, on one process: what they contain, how two differ, one in other files.

Any layout reads any checkpoint, but a rank reads a stored part of a tensor as a whole. A checkpoint
of a few ranks therefore costs many ranks memory and time, and one of a thousand ranks is a thousand
files. `reshard` cuts every tensor into at most as many parts as there are files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.folder import RECORD, CheckpointFolder
from moe_parallel.training.checkpoint.index import (
    TENSOR_INDEX,
    data_files,
    read_index,
    stored_shapes,
    tensor_entries,
)
from moe_parallel.training.checkpoint.optimizer import MASTER, MOMENTS, STATE_PREFIX, Box
from moe_parallel.training.checkpoint.record import FORMAT, check_content, is_whole, read_record
from moe_parallel.training.checkpoint.tensors import (
    StoredPart,
    whole_tensor,
    whole_tensors,
    write_alone,
)
from moe_parallel.training.run_lock import run_lock


def run_checkpoints(run: Path) -> CheckpointFolder:
    """The folder of a run that has checkpoints. Raises InputError if it has none."""
    if not run.is_dir():
        raise InputError(f"{run}: there is no such folder; check the path")
    if (run / RECORD).exists():
        raise InputError(f"{run} is one checkpoint: name the folder of its run, {run.parent}")
    folder = CheckpointFolder(run)
    if not folder.iterations():
        raise InputError(f"{run}: there is no checkpoint; name the folder given to --save")
    return folder


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint as its files on the disk show it, without reading their content."""

    path: Path
    size: int  # bytes
    written: datetime
    is_whole: bool

    @classmethod
    def of(cls, path: Path) -> StoredCheckpoint:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return cls(path, size, datetime.fromtimestamp(path.stat().st_mtime), is_whole(path))


def verify(checkpoint: Path) -> tuple[int, int]:
    """The number of the checkpoint's files, and their bytes. Reads them all.

    Raises InputError if a file is missing or damaged.
    """
    files = read_record(checkpoint)["files"]
    check_content(checkpoint, files, slice(None))
    return len(files), sum(facts["bytes"] for facts in files.values())


def checkpoint_facts(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """What a checkpoint is, by name."""
    record = read_record(checkpoint)
    tensors = stored_shapes(checkpoint)
    yield "checkpoint", checkpoint
    for name in ("iteration", "consumed_samples", "consumed_tokens"):
        yield name.replace("_", " "), f"{record['training'][name]:,}"
    layout = " ".join(f"{name} {size}" for name, size in record["layout"].items())
    yield "layout", layout or "none"
    yield "optimizer state", "no, weights only" if record["adam_step"] is None else "yes"
    yield "versions", ", ".join(f"{name} {v}" for name, v in record.get("versions", {}).items())
    yield "tensors", len(tensors)
    yield "size", size_text(sum(file["bytes"] for file in record["files"].values()))


def prune(run: Path, keep_last: int) -> list[Path]:
    """Delete all checkpoints but the latest `keep_last`; returns those deleted.

    Raises InputError if a run writes to the folder, if the folder cannot be locked, if the latest
    checkpoint is damaged, or if something cannot be deleted.
    """
    folder = run_checkpoints(run)
    with run_lock(run) as warnings:
        if warnings:  # a run may be writing there, and nothing would tell
            raise InputError(f"{run}: its file system has no locks: delete folders by hand")
        before, latest = folder.paths(), folder.latest()
        if latest not in before or latest.is_symlink() or not is_whole(latest):
            raise InputError(
                f"{run}: the latest checkpoint is damaged, so nothing is deleted; "
                "`verify` says what is whole"
            )
        folder.delete_oldest(folder.iterations()[before.index(latest)], keep_last)
        for path, why in folder.stuck.items():
            raise InputError(f"{path} cannot be deleted ({why}): delete it by hand")
        return sorted(set(before) - set(folder.paths()))


def size_text(amount: int) -> str:
    """A number of bytes for a user."""
    return f"{amount / 2**20:,.1f} MiB" if amount < 2**30 else f"{amount / 2**30:,.1f} GiB"


COMPARED_AT_ONCE = 2**22  # values
_PARTS = ("embedding.", "decoder.layers.", "decoder.", "output_layer.")
_STATES = ("", MASTER.removeprefix(STATE_PREFIX).rstrip("."), *MOMENTS)


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in both checkpoints, and how it differs."""

    key: str
    how: str


@dataclass(frozen=True)
class TensorComparison:
    """equal: the number of tensors that are the same to the bit."""

    equal: int
    differences: list[Difference]  # in the order of the model's layers


def compare(one: Path, other: Path) -> TensorComparison:
    """Compares all tensors of two checkpoints: weights, Adam's moments, and master weights.

    The random states are not compared: each rank has its own. Two tensors are in memory at a time.
    Raises StorageError if a file cannot be read.
    """
    first, second = (tensor_entries(read_index(each)) for each in (one, other))
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
    pairs = zip(whole_tensors(one, shared), whole_tensors(other, shared), strict=True)
    found = {key: how_values_differ(values, others) for (key, values), (_, others) in pairs}
    differences += [Difference(key, how) for key, how in found.items() if how is not None]
    equal = sum(how is None for how in found.values())
    differences.sort(key=lambda difference: place_in_model(difference.key))
    return TensorComparison(equal, differences)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def place_in_model(key: str) -> tuple[int, list[tuple[bool, int, str]], int]:
    """A key for sorting in the order in which the model computes: embedding, layers, final norm,
    output layer. The optimizer state of a weight follows the weight."""
    state, weight = "", key
    if key.startswith(STATE_PREFIX):
        state, _, weight = key.removeprefix(STATE_PREFIX).partition(".")
    part = next((i for i, part in enumerate(_PARTS) if weight.startswith(part)), len(_PARTS))
    # In the alphabet, too, `attention` and `input_layernorm` come before `mlp`.
    return part, _natural(weight.replace(".self_attention.", ".attention.")), _STATES.index(state)


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """A key for sorting in which layer 10 comes after layer 9."""
    words = re.split(r"(\d+)", key)
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in words]


#: States that each rank has for itself: other ranks than those that saved them cannot load them.
_OF_RANKS = ("random_state/", "fp8_state/")


def reshard(checkpoint: Path, folder: CheckpointFolder, files: int) -> Path:
    """Write `checkpoint` into `folder` in at most `files` files of tensors; returns its path.

    The tensors are the same to the bit. The random states and FP8's scales of the ranks are left
    out, so a run that continues from it starts them anew, as after any change of the layout. The
    memory needed is that of the largest tensor and two of its new parts.

    Raises:
        InputError: the checkpoint is damaged, or the folder has one of this iteration.
        StorageError: a file cannot be read.
        OSError: the disk is full or cannot be written.
    """
    record = read_record(checkpoint)
    check_content(checkpoint, record["files"], slice(None))
    iteration = record["training"]["iteration"]
    if iteration in folder.iterations():
        raise InputError(f"{folder.published_path(iteration)} exists already: name another folder")
    index = read_index(checkpoint)
    read = lru_cache(maxsize=1)(lambda key: whole_tensor(index, key, checkpoint))
    entries = sorted(tensor_entries(index).items())
    parts = [part for key, entry in entries for part in _cut(key, entry, files, read)]
    size = sum(math.prod(part.sizes) * part.dtype.itemsize for part in parts)
    new_record = {**record, "format": FORMAT, "layout": {}, "fp8_state": None}
    new_record.pop("checksum", None)
    return write_alone(
        folder,
        new_record,
        _other_files(checkpoint, record, index),
        parts,
        _states(checkpoint, index),
        math.ceil(size / files),
        files,
    )


def _cut(
    key: str, entry: TensorStorageMetadata, files: int, read: Callable[[str], torch.Tensor]
) -> Iterator[StoredPart]:
    """Parts along the longest dimension."""
    shape = tuple(entry.size)
    axis, longest = (shape.index(max(shape)), max(1, *shape)) if shape else (0, 1)
    each = math.ceil(longest / files)
    for begin in range(0, longest, each):
        offset = tuple(begin if at == axis else 0 for at in range(len(shape)))
        sizes = tuple(
            min(each, whole - begin) if at == axis else whole for at, whole in enumerate(shape)
        )
        part = partial(_part, read, key, Box(offset, sizes))
        yield StoredPart(key, shape, offset, sizes, entry.properties.dtype, part)


def _part(read: Callable[[str], torch.Tensor], key: str, box: Box) -> torch.Tensor:
    return read(key)[box.slices((0,) * len(box.offsets))]


def _states(checkpoint: Path, index: Metadata) -> dict[str, bytes]:
    """The objects stored with the tensors that belong to no rank, as they are stored."""
    found = {}
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata) and not key.startswith(_OF_RANKS):
            piece = index.storage_data[MetadataIndex(key)]
            with (checkpoint / piece.relative_path).open("rb") as file:
                file.seek(piece.offset)
                found[key] = file.read(piece.length)
    return found


def _other_files(
    checkpoint: Path, record: dict[str, Any], index: Metadata
) -> dict[str, str | Path]:
    """The files without tensors, by their names."""
    of_tensors = {TENSOR_INDEX, *data_files(index)}
    names = [name for name in record["files"] if name not in of_tensors]
    # A rank that holds no tensor may have written an empty file.
    return {name: checkpoint / name for name in names if not name.endswith(".distcp")}
