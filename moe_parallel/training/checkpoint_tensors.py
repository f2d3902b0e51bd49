"""Sharded tensors on disk: Megatron-Core's torch_dist format, written without helper processes.

Reading is `megatron.core.dist_checkpointing.load`. Writing takes the same steps as its `save`,
with torch's own writer in place of Megatron's: that one starts processes (a spawned manager and
forked writers, which hang a script without a __main__ guard and are unsafe beside gloo's threads),
and where one rank fails to write, the others wait. The files are the same.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from moe_parallel.agreement import StorageError, agree, on_rank_0, one_line


def write_tensors(content: dict[str, Any], folder: Path) -> None:
    """Write a dict of sharded tensors, sharded objects and plain values; all ranks take part.

    Every shard of a tensor must be the main replica on exactly one rank. Plain values are those
    of rank 0. Files are on the disk, not merely in its cache, when this returns.

    Raises:
        StorageError: on every rank, if a rank could not write.
    """
    sharded, common = agree(lambda: save_preprocess(content))
    on_rank_0(lambda: _write_common(common, folder))
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    try:
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(flat),
            storage_writer=_Writer(folder),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=False,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            ),
        )
    except CheckpointException as error:  # the same on every rank
        raise _first_failure(error) from error


def read_tensors(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read what `content` asks for, into its tensors, and the plain values; all ranks take part.

    Raises:
        StorageError: on every rank, if a rank could not read.
    """

    def read() -> dict[str, Any]:
        try:
            with _quietly():
                return dist_checkpointing.load(
                    content, str(folder), validate_access_integrity=False
                )
        except CheckpointException as error:  # by 0.16.1 alone; 0.19.2 raises what it met
            raise _first_failure(error) from error

    return agree(read)


def stored_tensors(folder: Path) -> dict[str, ShardedTensor]:
    """Every tensor in a checkpoint by key, without data: its global shape and dtype."""
    return dist_checkpointing.load_tensors_metadata(str(folder))


def of_this_rank(key: str, state: Any) -> ShardedObject:
    """What each rank has of its own, to be written; with None, to be read."""
    return ShardedObject(key, state, (dist.get_world_size(),), (dist.get_rank(),))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the notes on how Megatron-Core calls torch, and how we call it, at every load."""
    notes = logging.getLogger("megatron.core.dist_checkpointing.strategies.common")
    before = notes.disabled
    notes.disabled = True  # 0.19.2 would rather find no common.pt, which 0.16.1 needs
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`load_state_dict` is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", "The argument order of load", UserWarning)
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    finally:
        notes.disabled = before


def _first_failure(error: CheckpointException) -> Exception:
    """What the first rank that failed met; torch's own exception is not even an Exception."""
    failure, _ = next(iter(error.failures.values()))
    if isinstance(failure, OSError):
        return StorageError(one_line(failure))
    return RuntimeError(f"{type(failure).__name__}: {failure}")


def _write_common(common: dict[str, Any], folder: Path) -> None:
    torch.save(common, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


class _Writer(FileSystemWriter):
    """One file a rank, written and flushed by the rank itself."""

    def __init__(self, folder: Path):
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.fs = _FileSystem()


class _FileSystem(FileSystem):
    """Tells why a write failed; torch.save says `unexpected pos` when the disk is full."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            watched = _WatchedStream(stream, str(path))
            try:
                yield watched
            except RuntimeError as error:
                raise watched.failure or error from error


class _WatchedStream:
    """A file that remembers the error of its last failed write."""

    def __init__(self, stream: IOBase, path: str):
        self._stream = stream
        self._path = path
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._stream.write(data)
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, self._path)
            raise self.failure from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
