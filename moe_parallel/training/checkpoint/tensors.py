"""Sharded tensors on disk: Megatron-Core's torch_dist format, written without helper processes.

Writing takes the same steps as `megatron.core.dist_checkpointing.save`, with torch's own writer
instead of Megatron's. Megatron's starts processes (a spawned manager and forked writers, which hang
a script without a __main__ guard and are unsafe with gloo's threads), and if one rank fails to
write, the others wait. The files are the same.

Reading takes the same steps as its `load`, but unpickles only tensors and plain values.
"""

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import IOBase
from pathlib import Path
from typing import Any

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
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import safe_globals

from moe_parallel.collective_errors import (
    StorageError,
    agree,
    exchange,
    on_rank_0,
    one_line,
)
from moe_parallel.training.checkpoint.index import read_index, tensor_shapes

COMMON = "common.pt"

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
