"""A checkpoint written anew in another number of files, on one process.

Any layout reads any checkpoint, but a rank reads a stored part of a tensor as a whole. A checkpoint
of a few ranks therefore costs many ranks memory and time, and one of a thousand ranks is a thousand
files. Here every tensor is cut into at most as many parts as there are files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
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
from moe_parallel.training.checkpoint.files import (
    check_complete,
    check_content,
    describe_files,
    list_files,
)
from moe_parallel.training.checkpoint.folder import CheckpointFolder, copy_files
from moe_parallel.training.checkpoint.index import TENSOR_INDEX, data_files, read_index
from moe_parallel.training.checkpoint.parts import StoredPart, write_parts
from moe_parallel.training.checkpoint.record import FORMAT, read_record
from moe_parallel.training.checkpoint.whole import Entries, read_in_groups

#: States that each rank has for itself: other ranks than those that saved them cannot load them.
_OF_RANKS = ("random_state/", "fp8_state/")


def reshard(checkpoint: Path, folder: CheckpointFolder, files: int) -> Path:
    """Write `checkpoint` into `folder` in at most `files` files of tensors; returns its path.

    The tensors are the same to the bit. The random states and FP8's scales of the ranks are left
    out, so a run that continues from it starts them anew, as after any change of the layout. The
    memory needed is that of the largest tensor, or 256 MiB.

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
    writing = folder.begin(iteration)
    try:
        size = sum(piece.length for piece in index.storage_data.values())
        states = _states(checkpoint, index)
        parts = _parts(checkpoint, index, files)
        write_parts(parts, writing, states, math.ceil(size / files), files)
        copy_files(_other_files(checkpoint, record, index), writing)
        described = describe_files(writing, list_files(writing))
        check_complete(writing, described)
        changed = {"format": FORMAT, "layout": {}, "fp8_state": None, "files": described}
        return folder.publish(iteration, {**_unsealed(record), **changed}, None)
    except BaseException:
        folder.tidy()
        raise


def _parts(checkpoint: Path, index: Metadata, files: int) -> Iterator[StoredPart]:
    entries: Entries = {
        key: entry
        for key, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    for (tensors,) in read_in_groups(entries, entries, checkpoint):
        for key, tensor in tensors.items():
            yield from _cut(key, tensor, files)


def _cut(key: str, tensor: torch.Tensor, files: int) -> Iterator[StoredPart]:
    """Parts along the longest dimension."""
    shape = tuple(tensor.shape)
    if tensor.numel() == 0 or not shape:
        yield StoredPart(key, shape, (0,) * len(shape), shape, tensor.dtype, lambda: tensor)
        return
    axis = shape.index(max(shape))
    each = math.ceil(shape[axis] / files)
    for begin in range(0, shape[axis], each):
        length = min(each, shape[axis] - begin)
        offset = tuple(begin if at == axis else 0 for at in range(len(shape)))
        sizes = tuple(length if at == axis else whole for at, whole in enumerate(shape))
        read = partial(tensor.narrow, axis, begin, length)
        yield StoredPart(key, shape, offset, sizes, tensor.dtype, read)


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


def _unsealed(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "checksum"}
