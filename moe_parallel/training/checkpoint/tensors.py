"""TENSORS"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import IOBase
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import (
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import safe_globals

from moe_parallel.collective_errors import (
    StorageError,
    agree,
    exchange,
    on_rank_0,
    one_line,
)
from moe_parallel.platform.megatron_version import installed_version
from moe_parallel.training.checkpoint.folder import CheckpointFolder, copy_files
from moe_parallel.training.checkpoint.index import COMMON, TENSOR_INDEX, read_index, tensor_shapes
from moe_parallel.training.checkpoint.record import (
    FORMAT,
    as_json,
    check_complete,
    describe_files,
    list_files,
)

# numpy's random state in checkpoints of format 1; later ones store it as a tensor.
_ARRAYS: list[Any] = [
    numpy.empty(0).__reduce__()[0],
    numpy.ndarray,
    numpy.dtype,
    numpy.dtypes.UInt32DType,
]


@dataclass(frozen=True)
class Shards:
    """This rank's part of a sharded state dict, in the form in which it is written."""

    main: dict[str, list[Any]]  # by key: the shards and objects that this rank writes
    every: list[Any]  # all shards and objects of this rank, also those that another one writes
    common: dict[str, Any]  # plain values, of which those of rank 0 are written


def shards_of(content: dict[str, Any]) -> Shards:
    """The shards in a dict of sharded tensors, sharded objects and plain values.

    They refer to the tensors in `content`: nothing is copied.
    """
    sharded, common = save_preprocess(content, validate_access_integrity=False)
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    return Shards(dict(flat), list(nested_values(sharded)), common)


def write_tensors(shards: Shards, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the shards of all ranks, which all take part.

    Every shard of a tensor must be the main replica on exactly one rank. On return the files are
    on the disk, not merely in its cache. `group`: see `exchange`.

    Raises:
        StorageError: on every rank, if a rank could not write.
    """
    places = exchange([each.without_data() for each in shards.every], group)
    on_rank_0(lambda: validate_sharding_integrity(places), group)
    on_rank_0(lambda: write_common(shards.common, folder), group)
    try:
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(dict(shards.main)),
            storage_writer=_Writer(folder),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=False,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            ),
            process_group=group,
        )
    except CheckpointException as error:  # the same on every rank
        raise _unwritable(error) from error


def read_tensors(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read the values named in `content`, into its tensors where it has any; all ranks take part.

    No code in the files is executed: only tensors and plain values are created from them.

    Raises:
        StorageError: on every rank, if a rank could not read, or found something else.
    """

    def read() -> dict[str, Any]:
        with _reading():
            return _load(content, folder)

    return agree(read)


def read_whole(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Read whole tensors by their keys into `tensors`, on this process alone.

    Raises:
        StorageError: they cannot be read, or have other shapes.
    """
    with _reading():
        torch_checkpoint.load(
            dict(tensors), storage_reader=_Reader(folder), planner=_TensorPlanner(), no_dist=True
        )


def stored_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """The global shape of every tensor in a checkpoint, by its key. Raises StorageError."""
    return tensor_shapes(read_index(folder))


def of_this_rank(key: str, state: Any) -> ShardedObject:
    """A state that each rank has separately, to be written; with None, to be read."""
    return ShardedObject(key, state, (dist.get_world_size(),), (dist.get_rank(),))


def _load(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The steps of `megatron.core.dist_checkpointing.load`, with readers that execute no code."""
    force_all_tensors_to_non_fp8(content)
    sharded, values, factories = load_preprocess(content)
    sharded, _ = extract_sharded_base(sharded)
    flat, places, names = _replace_state_dict_keys_with_sharded_keys(sharded)
    tensors = [tensor for tensor in nested_values(sharded) if isinstance(tensor, ShardedTensor)]
    loaded = mcore_to_pyt_state_dict(flat, True)
    torch_checkpoint.load(
        loaded,
        storage_reader=_Reader(folder),
        planner=_LoadPlanner(
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch
            },
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        ),
        no_dist=True,  # each rank finds its parts without communication
    )
    unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in loaded.items()}
    result = _replace_sharded_keys_with_state_dict_keys(unwrapped, places, names)
    _restore_dict_types(result, sharded)
    merge(result, values)
    return apply_factory_merges(result, factories)


def not_finite(shards: Shards) -> list[str]:
    """The keys of the tensors of which this rank's part has a NaN or an infinity."""
    tensors = [
        each
        for each in shards.every
        if isinstance(each, ShardedTensor) and each.data.is_floating_point() and each.data.numel()
    ]
    # The extremes are NaN if any value is. They are found in one pass, without temporary tensors.
    extremes = (torch.stack(torch.aminmax(tensor.data.detach())) for tensor in tensors)
    finite = [extreme.isfinite().all() for extreme in extremes]
    every = torch.stack(finite).tolist() if finite else []  # only one wait for a GPU
    return [tensor.key for tensor, is_finite in zip(tensors, every, strict=True) if not is_finite]


@contextmanager
def _reading() -> Iterator[None]:
    """Convert any error inside to a StorageError.

    torch's warnings, at every load, about reading without torch.distributed are suppressed.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except (CheckpointException, Exception) as error:  # the first is not an Exception
        raise _unreadable(error) from error


def _first_failure(error: CheckpointException) -> BaseException:
    """The error of the first rank that failed."""
    failure: BaseException = next(iter(error.failures.values()))[0]
    return failure


def _unwritable(error: CheckpointException) -> Exception:
    """An error that is the same on every rank; torch's own exception is not even an Exception."""
    failure = _first_failure(error)
    if isinstance(failure, OSError):
        return StorageError(one_line(failure))
    return RuntimeError(f"{type(failure).__name__}: {failure}")


def _unreadable(error: BaseException) -> StorageError:
    """The error of files that cannot be read; damaged or crafted files may cause any exception."""
    failure = _first_failure(error) if isinstance(error, CheckpointException) else error
    if isinstance(failure, StorageError):
        return failure
    if isinstance(failure, OSError):
        return StorageError(one_line(failure))
    if isinstance(failure, pickle.UnpicklingError):
        return StorageError(
            "it contains something other than tensors and values, which was not run"
        )
    reason = str(failure).partition("\n")[0]
    return StorageError(f"{type(failure).__name__}: {reason}")


def write_common(common: dict[str, Any], folder: Path) -> None:
    """Write the plain values of a checkpoint, and what kind of files it has. Raises OSError."""
    content = io.BytesIO()
    torch.save(common, content)  # given a path, it would hide the reason why a write failed
    (folder / COMMON).write_bytes(content.getvalue())
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


class _Reader(FileSystemReader):
    """Reads the index without executing it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = read_index(Path(self.path))
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


class _LoadPlanner(MCoreLoadPlanner):
    """Reads objects without executing them; torch's own planner trusts them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with safe_globals(_ARRAYS):
            self.state_dict[read_item.dest_index.fqn] = torch.load(
                value, map_location="cpu", weights_only=True
            )


class _TensorPlanner(DefaultLoadPlanner):
    """Reads no objects."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise StorageError(f"{read_item.dest_index.fqn} is not a tensor")


class _Writer(FileSystemWriter):
    """Writes one file per rank, which the rank itself writes and flushes."""

    def __init__(self, folder: Path):
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.fs = WatchedFileSystem()


class WatchedFileSystem(FileSystem):
    """Raises the error of a failed write when the file is closed, not inside torch.save."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            watched = _WatchedStream(stream, str(path))
            yield watched
            if watched.failure:
                raise watched.failure


class _WatchedStream:
    """A file that keeps the error of a failed write, and ignores later writes.

    The error must not pass through torch.save: its C++ writer raises `unexpected pos` instead, and
    an exception through it ends in a segmentation fault at the next garbage collection
    (torch 2.13 on Python 3.12).
    """

    def __init__(self, stream: IOBase, path: str):
        self._stream = stream
        self._path = path
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        if not self.failure:
            try:
                return self._put(data)
            except OSError as error:
                self.failure = OSError(error.errno, error.strerror, self._path)
        return len(data)

    def _put(self, data: bytes) -> int:
        written: int = self._stream.write(data)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
