"""Sharded tensors on disk: Megatron-Core's torch_dist format, written and read by torch.

Megatron-Core's modules say which part of which tensor a rank holds (`ShardedTensor`), and torch's
distributed checkpoint writes and reads the files; the planners below connect the two.
`megatron.core.dist_checkpointing.save` would start processes (a spawned manager and forked writers,
which hang a script without a __main__ guard and are unsafe with gloo's threads), and if one rank
failed to write, the others would wait; its `load` unpickles whatever is there. The files are the
same. Here only tensors and plain values are unpickled.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import IOBase
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factories,
    is_main_replica,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moe_parallel.collective_errors import StorageError, agree, on_rank_0, one_line
from moe_parallel.platform.megatron import installed_version
from moe_parallel.training.checkpoint.folder import CheckpointFolder, copy_files
from moe_parallel.training.checkpoint.index import COMMON, read_index, tensor_entries
from moe_parallel.training.checkpoint.record import (
    FORMAT,
    as_json,
    check_complete,
    describe_files,
    list_files,
)

#: Bytes after which another file begins. Ranks that load the checkpoint share its files to check.
FILE_BYTES = 2**32
#: Megatron-Core's linear layers have a state of their own besides their weights: nothing.
_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

Sharded: TypeAlias = ShardedTensor | ShardedObject


def sharded_values(content: Any) -> list[Sharded]:
    """Every sharded tensor and object in a sharded state dict, also those that factories make."""
    sharded, _ = extract_sharded_base(content)
    apply_factories(sharded)
    return list(nested_values(sharded))


def sharded_tensors(content: Any) -> list[ShardedTensor]:
    """The tensors among `sharded_values`; their data is the model's own memory."""
    return [value for value in sharded_values(content) if isinstance(value, ShardedTensor)]


def of_this_rank(key: str, state: Any) -> ShardedObject:
    """A state that each rank has separately, to be written; with None, to be read."""
    return ShardedObject(key, state, (dist.get_world_size(),), (dist.get_rank(),))


def not_finite(values: Iterable[Sharded]) -> list[str]:
    """The keys of the tensors of which this rank's part has a NaN or an infinity."""
    tensors = [
        each
        for each in values
        if isinstance(each, ShardedTensor) and each.data.is_floating_point() and each.data.numel()
    ]
    # The extremes are NaN if any value is. They are found in one pass, without temporary tensors.
    extremes = (torch.stack(torch.aminmax(tensor.data.detach())) for tensor in tensors)
    finite = [extreme.isfinite().all() for extreme in extremes]
    every = torch.stack(finite).tolist() if finite else []  # only one wait for a GPU
    return [tensor.key for tensor, is_finite in zip(tensors, every, strict=True) if not is_finite]


# Writing.


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor that is to be stored. All parts of a tensor together are all of it."""

    key: str  # of the tensor
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # of the part's first element in it
    sizes: tuple[int, ...]  # of the part
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]  # returns the part, [*sizes] in any dtype


def write_tensors(
    values: Iterable[Sharded], folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Write the sharded values of all ranks, which all take part.

    Every part of a tensor must be the main replica on exactly one rank. On return the files are
    on the disk, not merely in its cache. `group`: see `exchange`.

    Raises:
        StorageError: on every rank, if a rank could not write.
    """
    on_rank_0(lambda: write_common(folder), group)
    own = [value for value in values if is_main_replica(value.replica_id)]
    parts = [_part_of(value) for value in own if isinstance(value, ShardedTensor)]
    objects = {
        value.unique_key: _saved([value.data])  # a list, as Megatron-Core stores it
        for value in own
        if isinstance(value, ShardedObject)
    }
    try:
        torch_checkpoint.save(
            {},
            storage_writer=_Writer(folder),
            planner=_SavePlanner(parts, objects),
            process_group=group,
        )
    except CheckpointException as error:  # the same on every rank; it is not even an Exception
        failure: BaseException = next(iter(error.failures.values()))[0]  # of the first rank
        if isinstance(failure, OSError):
            raise StorageError(one_line(failure)) from error
        raise RuntimeError(f"{type(failure).__name__}: {failure}") from error


def write_common(folder: Path) -> None:
    """Write what kind of files a checkpoint has, and no plain values. Raises OSError."""
    (folder / COMMON).write_bytes(_saved({}))
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def write_weights(
    folder: CheckpointFolder,
    parts: Iterable[StoredPart],
    fingerprint: Mapping[str, object],
    files: Mapping[str, str | Path],
) -> Path:
    """Write a checkpoint of iteration 0 without optimizer state, from one process; returns its
    path.

    It is published when it is complete, or not at all.

    Args:
        folder: of the run.
        parts: of all tensors of the model, by their keys in a checkpoint.
        fingerprint: see `Checkpointer`.
        files: small files to store with the weights, see `copy_files`.

    Raises OSError if the disk is full or cannot be written.
    """
    parts = list(parts)
    linear = {
        part.key.removesuffix("weight") + "_extra_state/shard_0_1"
        for part in parts
        if part.key.removesuffix(".weight").endswith(_LINEAR)
    }
    states = dict.fromkeys(sorted(linear), _saved([None]))
    record = {
        "format": FORMAT,
        "training": {"iteration": 0, "consumed_samples": 0, "consumed_tokens": 0},
        "adam_step": None,
        "scheduler": None,
        "layout": {},  # that of no run: there are no random states
        "fp8_state": None,
        "fingerprint": as_json(fingerprint),
        "versions": {"torch": torch.__version__, "megatron-core": installed_version()},
    }
    return write_alone(folder, record, files, parts, states)


def write_alone(
    folder: CheckpointFolder,
    record: Mapping[str, Any],
    files: Mapping[str, str | Path],
    parts: Sequence[StoredPart],
    states: Mapping[str, bytes],
    most_files: int | None = None,
) -> Path:
    """Write and publish a checkpoint without a model, on one process; returns its path.

    A part is in memory while it is written, and no other one.

    Args:
        folder: of the run.
        record: see record.py, without the files.
        files: small files to store with the tensors, see `copy_files`.
        parts: of all tensors.
        states: by key, the objects to store with the tensors, as another checkpoint has them.
        most_files: of tensors, of about equal sizes; None: as FILE_BYTES says.

    Raises OSError if the disk is full or cannot be written.
    """
    iteration = record["training"]["iteration"]
    writing = folder.begin(iteration)
    try:
        # Each file is planned as if it were a rank's.
        planner = _SavePlanner(parts, states)
        sizes = [math.prod(part.sizes) * part.dtype.itemsize for part in parts]
        file_bytes = sum(sizes) / most_files if most_files else FILE_BYTES
        plans: list[SavePlan] = [SavePlan([])]
        written = 0
        for item, size in zip(planner.items, sizes, strict=False):
            if written >= file_bytes and len(plans) != most_files:
                plans.append(SavePlan([]))
                written = 0
            plans[-1].items.append(item)
            written += size
        plans[-1].items.extend(planner.items[len(parts) :])
        plans, index = planner.create_global_plan(plans)
        writer = _Writer(writing)
        results = []
        for plan in writer.prepare_global_plan(plans):
            # torch keeps all tensors of a file until it is complete, but no bytes.
            items = [replace(item, type=WriteItemType.BYTE_IO) for item in plan.items]
            results.append(writer.write_data(replace(plan, items=items), planner).wait())
        writer.finish(index, results)
        write_common(writing)
        copy_files(files, writing)
        described = describe_files(writing, list_files(writing))
        check_complete(writing, described)
        return folder.publish(iteration, {**record, "files": described}, None)
    except BaseException:
        folder.tidy()
        raise


def _part_of(shard: ShardedTensor) -> StoredPart:
    values = shard.data.detach()[(None,) * shard.prepend_axis_num]
    shape, offset, sizes = map(tuple, (shard.global_shape, shard.global_offset, values.shape))
    return StoredPart(shard.key, shape, offset, sizes, values.dtype, lambda: values)


def _saved(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


class _SavePlanner(DefaultSavePlanner):
    """Writes parts of tensors, and objects: by key, what torch.save has made of them."""

    def __init__(self, parts: Iterable[StoredPart], objects: Mapping[str, bytes]) -> None:
        super().__init__(flatten_state_dict=False)
        self.items: list[WriteItem] = []
        self._values: dict[MetadataIndex, StoredPart | bytes] = {}
        for part in parts:
            index = MetadataIndex(part.key, torch.Size(part.offset))
            place = ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.sizes))
            properties = TensorProperties(dtype=part.dtype)
            data = TensorWriteData(place, properties, torch.Size(part.shape))
            self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self._values[index] = part
        for key, content in objects.items():
            index = MetadataIndex(key)
            self.items.append(WriteItem(index, WriteItemType.BYTE_IO))
            self._values[index] = content

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self.items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._values[write_item.index]
        if isinstance(value, bytes):
            return io.BytesIO(value)
        tensor = value.read().to(value.dtype).contiguous()
        assert tensor.shape == value.sizes, (value.key, tensor.shape, value.sizes)
        if write_item.type == WriteItemType.SHARD:
            return tensor
        # torch.save would write the whole storage of a view.
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        return io.BytesIO(_saved(tensor if whole else tensor.clone()))


class _Writer(FileSystemWriter):
    """Writes one file per rank, which the rank itself writes and flushes."""

    def __init__(self, folder: Path):
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.fs = _WatchedFileSystem()


class _WatchedFileSystem(FileSystem):
    """Raises the error of a failed write when the file is closed, not inside torch.save.

    Through torch.save, its C++ writer would raise `unexpected pos` instead, and an exception
    through it ends in a segmentation fault at the next garbage collection (torch 2.13 on Python
    3.12).
    """

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            watched = _WatchedStream(stream, str(path))
            yield watched
            if watched.failure:
                raise watched.failure


class _WatchedStream:
    """A file that keeps the error of a failed write, and ignores later writes."""

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


# Reading.


def read_tensors(values: Iterable[Sharded], folder: Path) -> dict[str, Any]:
    """Read into sharded tensors in place, and return the objects by their keys; all ranks take
    part.

    Of a tensor that may have another shape, what the checkpoint lacks becomes zero.

    Raises:
        StorageError: on every rank, if a rank could not read, or found something else.
    """
    values = list(values)
    tensors = [value for value in values if isinstance(value, ShardedTensor)]
    objects = [value for value in values if isinstance(value, ShardedObject)]

    def read() -> dict[str, Any]:
        wanted = []
        for tensor in tensors:
            data = tensor.data.detach()[(None,) * tensor.prepend_axis_num]
            if tensor.allow_shape_mismatch:
                data.zero_()
            wanted.append((tensor.key, tuple(tensor.global_offset), data))
        found = _read(read_index(folder), folder, wanted, [each.unique_key for each in objects])
        return {each.key: found[each.unique_key] for each in objects}

    return agree(read)


def read_whole(
    tensors: Mapping[str, torch.Tensor], folder: Path, index: Metadata | None = None
) -> None:
    """Read whole tensors by their keys into `tensors`, on this process alone.

    `index`: of the checkpoint; None: read it. Raises StorageError: they cannot be read, or have
    other shapes.
    """
    index = index or read_index(folder)
    entries = tensor_entries(index)
    for key, tensor in tensors.items():
        if key not in entries or entries[key].size != tensor.size():
            raise StorageError(f"{key} is not a tensor of {list(tensor.size())}")
    _read(index, folder, [(key, (0,) * t.dim(), t) for key, t in tensors.items()], [])


def whole_tensor(index: Metadata, key: str, folder: Path) -> torch.Tensor:
    """A tensor of a checkpoint with this index, on this process alone. Raises StorageError."""
    entry = tensor_entries(index)[key]
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_whole({key: tensor}, folder, index)
    return tensor


def read_part(
    index: Metadata, key: str, offset: tuple[int, ...], part: torch.Tensor, folder: Path
) -> None:
    """Read the part of a tensor that begins at `offset` into `part`. Raises StorageError."""
    _read(index, folder, [(key, offset, part)], [])


def _read(
    index: Metadata,
    folder: Path,
    wanted: Iterable[tuple[str, tuple[int, ...], torch.Tensor]],
    objects: Iterable[str],
) -> dict[str, Any]:
    """Read parts of tensors, each given by key and offset, in place; returns the objects."""
    try:
        parts: defaultdict[str, list[tuple[ChunkStorageMetadata, torch.Tensor]]] = defaultdict(list)
        for key, offset, data in wanted:
            parts[key].append((ChunkStorageMetadata(torch.Size(offset), data.size()), data))
        nowhere = torch.Size([0])
        items = [
            ReadItem(LoadItemType.BYTE_IO, place, nowhere, place, nowhere, nowhere)
            for place in map(MetadataIndex, objects)
        ]
        for key, of_key in parts.items():
            entry = index.state_dict_metadata.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                raise StorageError(f"{key} is not a tensor there")
            items += create_read_items_for_chunk_list(key, entry, [place for place, _ in of_key])
        planner = _LoadPlanner({key: [data for _, data in of_key] for key, of_key in parts.items()})
        reader = FileSystemReader(folder)
        reader.set_up_storage_reader(index, is_coordinator=True)
        reader.read_data(LoadPlan(items), planner).wait()
        return planner.objects
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(one_line(error)) from error
    except pickle.UnpicklingError as error:
        raise StorageError(
            "it contains something other than tensors and values, which was not run"
        ) from error
    except Exception as error:  # damaged or crafted files may cause any
        reason = str(error).partition("\n")[0]
        raise StorageError(f"{type(error).__name__}: {reason}") from error


class _LoadPlanner(DefaultLoadPlanner):
    """Reads into given tensors, and objects without executing them, which torch's planner does."""

    def __init__(self, tensors: Mapping[str, list[torch.Tensor]]) -> None:
        super().__init__()
        self._tensors = tensors
        self.objects: dict[str, Any] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.index is not None
        part = self._tensors[index.fqn][index.index]
        starts_and_lengths = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return part[tuple(slice(start, start + length) for start, length in starts_and_lengths)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """`resolve_tensor` returned a view: nothing is left to do."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        (found,) = torch.load(value, map_location="cpu", weights_only=True)
        self.objects[read_item.dest_index.fqn] = found
