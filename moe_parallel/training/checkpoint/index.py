"""`.metadata`, the index of the tensors in a checkpoint, read as data only.

torch writes the index as a pickle, and a pickle may call any function. Loading an untrusted
checkpoint must be harmless, so only the classes of an index may be named in it.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from moe_parallel.collective_errors import StorageError
from moe_parallel.reading import open_regular

TENSOR_INDEX = ".metadata"
COMMON = "common.pt"  # the plain values, which have no use here and are not read
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


def _memory_format(owner: Any, name: str) -> Any:
    """Stands for `getattr`: so Python 3.11.2, that of Debian 12, pickles a member of an enum."""
    if owner is _Unread:
        return _Unread()
    _demand(owner is metadata._MEM_FORMAT_ENCODING, f"it asks {owner} for {name!r}")
    return owner[name]


@dataclasses.dataclass(init=False, eq=False)
class _Unread:
    """Stands for what nobody reads: the plans of a save, which Megatron-Core adds to the index."""

    def __init__(self, *_: Any) -> None: ...


# Everything that an index may refer to, by module and name.
_PARTS: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _memory_format,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,  # Python 3.13's name
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (filesystem.__name__, "_StorageInfo"): _StorageInfo,
    **{
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    },
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
            "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
        ).split()
    },
    **{
        (planner.__name__, name): _Unread
        for name in "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData".split()
    },
}


class _Memo(dict[int, Any]):
    """Objects that a pickle uses again. Those that hold others are not read again: to hash or show
    sixty pairs, each of the one before, twice, has no end."""

    def __getitem__(self, key: int) -> Any:
        value = super().__getitem__(key)
        kind = type(value)
        holds = kind in (tuple, list, dict, set, frozenset) or dataclasses.is_dataclass(kind)
        return _Unread() if holds else value


class _Unpickler(pickle._Unpickler):
    """Python's own in Python: the one in C allocates what a pickle tells it to, and an instruction
    that sets the attributes of an object may be given a class."""

    stack: list[Any]
    dispatch = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # would allocate, too
    del dispatch[pickle.DUP[0]]

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.memo = _Memo()

    def load_build(self) -> None:
        kind = type(self.stack[-2])
        _demand(dataclasses.is_dataclass(kind), f"it sets attributes of a {kind.__name__}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _PARTS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is not part of an index and was not run"
            ) from None


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint, after every entry has been checked.

    Raises:
        StorageError: it cannot be read, or is not an index.
    """
    with open_regular(folder / TENSOR_INDEX) as file:
        try:
            index = _Unpickler(file).load()
            _check(index)
        except OSError:
            raise
        except Exception as error:  # arbitrary bytes may cause any error
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise StorageError(
                f"{TENSOR_INDEX} is not the index of a checkpoint: {reason}"
            ) from error
    return index


def data_files(index: Metadata) -> dict[str, int]:
    """The files that contain the tensors of an index, and the least size of each in bytes."""
    sizes: dict[str, int] = {}
    for piece in index.storage_data.values():
        name = piece.relative_path
        sizes[name] = max(sizes.get(name, 0), piece.offset + piece.length)
    return sizes


Entries: TypeAlias = Mapping[str, TensorStorageMetadata]


def tensor_entries(index: Metadata) -> Entries:
    """The dtype and the shape of every tensor, by its key."""
    entries = index.state_dict_metadata.items()
    return {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint, by its key. Raises StorageError."""
    return {key: tuple(entry.size) for key, entry in tensor_entries(read_index(folder)).items()}


def _check(index: Any) -> None:
    """Raises ValueError, or any other error that an entry of a wrong kind causes."""
    _demand(type(index) is Metadata, "it is something else")
    _demand(type(index.state_dict_metadata) is dict and type(index.storage_data) is dict, "no maps")
    for place, piece in index.storage_data.items():
        _demand(type(place) is MetadataIndex and type(piece) is _StorageInfo, "a wrong entry")
        name = piece.relative_path
        _demand(_DATA_FILE.fullmatch(name) is not None, f"it names the file {name!r}")
        _demand(_are_sizes((piece.offset, piece.length)), f"{place.fqn} has no place")
        _demand(not piece.transform_descriptors, f"{place.fqn} is transformed")
    for key, entry in index.state_dict_metadata.items():
        _demand(type(key) is str, f"{key!r} is not a key")
        if type(entry) is TensorStorageMetadata:
            _check_tensor(key, entry, index.storage_data)
        else:
            _demand(type(entry) is BytesStorageMetadata, f"{key} is of no known kind")
            _demand(MetadataIndex(key) in index.storage_data, f"{key} is nowhere")


def _check_tensor(key: str, entry: TensorStorageMetadata, places: Mapping[Any, Any]) -> None:
    size = entry.size
    _demand(isinstance(entry.properties.dtype, torch.dtype) and _are_sizes(size), f"{key}: no size")
    for chunk in entry.chunks:
        _demand(type(chunk) is ChunkStorageMetadata, f"{key} has a wrong part")
        _demand(_are_sizes(chunk.offsets) and _are_sizes(chunk.sizes), f"{key} has a wrong part")
        inside = (
            first + length <= whole
            for first, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        )
        _demand(all(inside), f"a part of {key} is outside of it")
        _demand(MetadataIndex(key, chunk.offsets) in places, f"a part of {key} is nowhere")
    parts = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    _demand(parts == math.prod(size), f"the parts of {key} are not all of it")


def _are_sizes(numbers: Any) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
