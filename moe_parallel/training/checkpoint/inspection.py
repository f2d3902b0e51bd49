"""Checkpoints for a user, on one process: how two differ, and one written anew.

Any layout reads any checkpoint, but a rank reads a stored part of a tensor as a whole. A checkpoint
of a few ranks therefore costs many ranks memory and time, and one of a thousand ranks is a thousand
files. `rewrite` cuts every tensor into at most as many parts as there are files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.folder import CheckpointFolder
from moe_parallel.training.checkpoint.index import (
    TENSOR_INDEX,
    data_files,
    read_index,
    tensor_entries,
)
from moe_parallel.training.checkpoint.optimizer import STATE_PREFIX
from moe_parallel.training.checkpoint.record import FORMAT, check_content, read_record
from moe_parallel.training.checkpoint.tensors import StoredPart, whole_tensor, write_alone

COMPARED_AT_ONCE = 2**22  # values

Change = Callable[[str, torch.Tensor], torch.Tensor]
_PARTS = ("embedding.", "decoder.layers.", "decoder.", "output_layer.")


def compare(one: Path, other: Path) -> tuple[int, dict[str, str]]:
    """The number of tensors that are the same in two checkpoints to the bit, and how each of the
    others differs, by its key, in the order of the model's layers.

    Weights, Adam's moments and master weights are compared, the random states are not: each rank
    has its own. Two tensors are in memory at a time. Raises StorageError if a file cannot be read.
    """
    indices = read_index(one), read_index(other)
    first, second = map(tensor_entries, indices)
    equal, differences = 0, {}
    for key in sorted(first.keys() | second.keys(), key=place_in_model):
        if key not in first or key not in second:
            differences[key] = f"only in {one if key in first else other}"
            continue
        kinds = [f"{e.properties.dtype} {list(e.size)}" for e in (first[key], second[key])]
        if kinds[0] == kinds[1]:
            found = map(whole_tensor, indices, (key, key), (one, other))
            how = how_values_differ(*found)
        else:
            how = " and ".join(kinds).replace("torch.", "")
        if how is None:
            equal += 1
        else:
            differences[key] = how
    return equal, differences


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


def place_in_model(key: str) -> tuple[int, list[str | int], str]:
    """A key for sorting in the order in which the model computes: embedding, layers, final norm,
    output layer. The optimizer state of a weight follows the weight."""
    state, weight = "", key
    if key.startswith(STATE_PREFIX):
        state, _, weight = key.removeprefix(STATE_PREFIX).partition(".")
    part = next((i for i, part in enumerate(_PARTS) if weight.startswith(part)), len(_PARTS))
    # In the alphabet, too, `attention` and `input_layernorm` come before `mlp`.
    words = re.split(r"(\d+)", weight.replace(".self_attention.", ".attention."))
    return part, [int(word) if word.isdigit() else word for word in words], state


def unchanged(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself."""
    return tensor


def rewrite(
    checkpoint: Path, folder: CheckpointFolder, files: int, change: Change = unchanged
) -> Path:
    """Write `checkpoint` into `folder` in at most `files` files of tensors; returns its path.

    The random states and FP8's scales of the ranks are left out, so a run that continues from it
    starts them anew, as after any change of the layout. The memory needed is that of the largest
    tensor, before and after `change`, and two of its new parts.

    `change`: of a tensor by its key, to one of the same shape and dtype.

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
    read = lru_cache(maxsize=1)(lambda key: change(key, whole_tensor(index, key, checkpoint)))
    parts = [
        part
        for key, entry in sorted(tensor_entries(index).items())
        for part in _cut(key, entry, files, read)
    ]
    states = {}
    for key, entry in index.state_dict_metadata.items():
        of_a_rank = key.startswith(("random_state/", "fp8_state/"))
        if isinstance(entry, BytesStorageMetadata) and not of_a_rank:
            piece = index.storage_data[MetadataIndex(key)]
            with (checkpoint / piece.relative_path).open("rb") as file:
                file.seek(piece.offset)
                states[key] = file.read(piece.length)
    of_tensors = {TENSOR_INDEX, *data_files(index)}
    small = {
        name: checkpoint / name
        for name in record["files"]
        if name not in of_tensors and not name.endswith(".distcp")  # of a rank without tensors
    }
    new_record = {**record, "format": FORMAT, "layout": {}, "fp8_state": None}
    return write_alone(folder, new_record, small, parts, states, files)


def _cut(
    key: str, entry: TensorStorageMetadata, files: int, read: Callable[[str], torch.Tensor]
) -> Iterator[StoredPart]:
    """Parts along the longest dimension."""
    shape = tuple(entry.size)
    if not shape:
        yield StoredPart(key, (), (), (), entry.properties.dtype, partial(read, key))
        return
    axis = shape.index(max(shape))
    each = max(1, math.ceil(shape[axis] / files))
    for begin in range(0, max(1, shape[axis]), each):
        size = min(each, shape[axis] - begin)
        offset = (0,) * axis + (begin,) + (0,) * (len(shape) - axis - 1)
        sizes = (*shape[:axis], size, *shape[axis + 1 :])
        part = partial(_part, read, key, axis, begin, size)
        yield StoredPart(key, shape, offset, sizes, entry.properties.dtype, part)


def _part(
    read: Callable[[str], torch.Tensor], key: str, axis: int, begin: int, size: int
) -> torch.Tensor:
    return read(key).narrow(axis, begin, size)
