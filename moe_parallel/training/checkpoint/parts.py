"""A checkpoint of weights, written without a model: one part of a tensor at a time, on one process.

The files are those of `tensors.write_tensors`. A part is in memory while it is written, and no
other one. torch's own writer keeps all tensors of a file.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_parallel.platform.megatron import installed_version
from moe_parallel.training.checkpoint.files import check_complete, describe_files, list_files
from moe_parallel.training.checkpoint.folder import CheckpointFolder, copy_files
from moe_parallel.training.checkpoint.index import TENSOR_INDEX
from moe_parallel.training.checkpoint.record import FORMAT, as_json
from moe_parallel.training.checkpoint.tensors import WatchedFileSystem, write_common

#: Bytes after which another file begins. Ranks that load the checkpoint share its files to check.
FILE_BYTES = 2**32
#: Megatron-Core's linear layers have a state of their own besides their weights: nothing.
_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_NO_STATE = [None]


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor that is to be stored. All parts of a tensor together are all of it."""

    key: str  # of the tensor
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # of the part's first element in it
    sizes: tuple[int, ...]  # of the part
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]  # returns the part, [*sizes] in any dtype, on the CPU


def write_weights(
    folder: CheckpointFolder,
    parts: Iterable[StoredPart],
    fingerprint: Mapping[str, object],
    files: Mapping[str, str | Path],
) -> Path:
    """Write a checkpoint of iteration 0 without optimizer state; returns its path.

    It is published when it is complete, or not at all.

    Args:
        folder: of the run.
        parts: of all tensors of the model, by the keys of `model_tensors`.
        fingerprint: see `Checkpointer`.
        files: small files to store with the weights, see `copy_files`.

    Raises OSError if the disk is full or cannot be written.
    """
    writing = folder.begin(0)
    try:
        write_parts(parts, writing)
        write_common({}, writing)
        copy_files(files, writing)
        described = describe_files(writing, list_files(writing))
        check_complete(writing, described)
        record = {
            "format": FORMAT,
            "training": {"iteration": 0, "consumed_samples": 0, "consumed_tokens": 0},
            "adam_step": None,
            "scheduler": None,
            "layout": {},  # that of no run: there are no random states
            "fp8_state": None,
            "fingerprint": as_json(fingerprint),
            "versions": {"torch": torch.__version__, "megatron-core": installed_version()},
            "files": described,
        }
        return folder.publish(0, record, None)
    except BaseException:
        folder.tidy()
        raise


def write_parts(
    parts: Iterable[StoredPart],
    folder: Path,
    states: Mapping[str, bytes] | None = None,
    file_bytes: int | None = None,
    most_files: int | None = None,
) -> None:
    """Write parts of tensors, and their index, into an empty folder.

    Args:
        parts: of all tensors.
        folder: the folder.
        states: by key, the objects to store with the tensors, as another checkpoint has them.
            None: those of Megatron-Core's linear layers.
        file_bytes: the size at which another file begins. None: FILE_BYTES.
        most_files: the number of files, of which the last one has all that remains.

    Raises OSError.
    """
    if file_bytes is None:
        file_bytes = FILE_BYTES
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    values = _values(parts, entries, states)
    value, number = next(values, None), 0
    while value is not None:
        name = f"__0_{number}.distcp"
        with WatchedFileSystem().create_stream(folder / name, "wb") as stream:
            is_last = number + 1 == most_files
            while value is not None and (is_last or stream.tell() < file_bytes):
                index, read = value
                begin = stream.tell()
                content = read()
                if isinstance(content, bytes):
                    stream.write(content)
                else:
                    torch.save(content, stream)
                if stream.failure is not None:
                    raise stream.failure
                places[index] = _StorageInfo(name, begin, stream.tell() - begin)
                value = next(values, None)
        number += 1
    index_of_all = Metadata(entries, storage_data=places, version=CURRENT_DCP_VERSION)
    (folder / TENSOR_INDEX).write_bytes(pickle.dumps(index_of_all))


def _values(
    parts: Iterable[StoredPart], entries: dict[str, Any], states: Mapping[str, bytes] | None
) -> Iterator[tuple[MetadataIndex, Callable[[], Any]]]:
    """Each value to be stored, by its place, not yet read; describes it in `entries`."""
    for part in parts:
        entry = entries.get(part.key)
        if entry is None:
            properties = TensorProperties(dtype=part.dtype)
            entry = TensorStorageMetadata(properties, torch.Size(part.shape), [])
            entries[part.key] = entry
        offset = torch.Size(part.offset)
        entry.chunks.append(ChunkStorageMetadata(offset, torch.Size(part.sizes)))
        yield MetadataIndex(part.key, offset), partial(_as_stored, part)
    stored: Mapping[str, Any] = _states_of_linear_layers(entries) if states is None else states
    for key, content in stored.items():
        entries[key] = BytesStorageMetadata()
        yield MetadataIndex(key), partial(_same, content)


def _same(content: Any) -> Any:
    return content


def _states_of_linear_layers(keys: Iterable[str]) -> dict[str, list[None]]:
    split = (key.rpartition(".") for key in keys)
    return {
        f"{module}._extra_state/shard_0_1": _NO_STATE
        for module, _, name in split
        if name == "weight" and module.endswith(_LINEAR)
    }


def _as_stored(part: StoredPart) -> torch.Tensor:
    tensor = part.read().to(part.dtype)
    assert tensor.shape == part.sizes, (part.key, tensor.shape, part.sizes)
    # torch.save would write the whole storage of a view.
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
