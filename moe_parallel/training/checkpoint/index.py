"""`.metadata`, the index of the tensors in a checkpoint, read as data only.

torch writes the index as a pickle, and a pickle may call any function. Loading an untrusted
checkpoint must be harmless, so only the classes of an index may be named in it. (torch's own
unpickler of weights does not know this protocol.)
"""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from moe_parallel.collective_errors import StorageError
from moe_parallel.reading import open_regular

TENSOR_INDEX = ".metadata"
COMMON = "common.pt"  # the plain values, which have no use here and are not read
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")
_DTYPES = " ".join(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))


def _memory_format(owner: Any, name: str) -> Any:
    """Stands for `getattr`: so Python 3.11.2, that of Debian 12, pickles a member of an enum."""
    if owner is _Unread:
        return _Unread()
    if owner is not metadata._MEM_FORMAT_ENCODING:
        raise ValueError(f"it asks {owner} for {name!r}")
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
    **{
        (module.__name__, name): getattr(module, name)
        for module, names in (
            (torch, f"Size {_DTYPES}"),
            (torch.serialization, "_get_layout"),
            (filesystem, "_StorageInfo"),
            (
                metadata,
                "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
                "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
            ),
        )
        for name in names.split()
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
        if kind in (tuple, list, dict, set, frozenset) or dataclasses.is_dataclass(kind):
            return _Unread()
        return value


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
        if not dataclasses.is_dataclass(kind):
            raise ValueError(f"it sets attributes of a {kind.__name__}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PARTS:
            raise ValueError(
                f"it names {module}.{name}, which is not part of an index and was not run"
            )
        return _PARTS[module, name]


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


def _check(index: Any) -> None:
    """Raises ValueError, or any other error that an entry of a wrong kind causes."""
    if type(index) is not Metadata:
        raise ValueError("it is something else")
    for place, piece in index.storage_data.items():
        if not _DATA_FILE.fullmatch(piece.relative_path):
            raise ValueError(f"it names the file {piece.relative_path!r}")
        if min(piece.offset, piece.length) < 0 or piece.transform_descriptors:
            raise ValueError(f"{place.fqn} is nowhere")
    for key, entry in index.state_dict_metadata.items():
        places = [MetadataIndex(key)]
        if isinstance(entry, TensorStorageMetadata):
            places = [MetadataIndex(key, chunk.offsets) for chunk in entry.chunks]
            _check_parts(key, entry)
        if type(key) is not str or not all(place in index.storage_data for place in places):
            raise ValueError(f"a part of {key} is nowhere")


def _check_parts(key: str, entry: TensorStorageMetadata) -> None:
    whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    sizes = 0
    for chunk in entry.chunks:
        stops = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
        part = whole[tuple(map(slice, chunk.offsets, stops))]
        if part.shape != chunk.sizes or min(chunk.offsets, default=0) < 0:
            raise ValueError(f"a part of {key} is outside of it")
        sizes += part.numel()
    if sizes != whole.numel():
        raise ValueError(f"the parts of {key} are not all of it")


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
