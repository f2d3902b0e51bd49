"""checkpoint.json, a checkpoint's record of its run and its files, and what is checked with it.

format          2
checksum        of all other fields, see data/sealed.py
training        iteration, consumed_samples, consumed_tokens; unlogged, see loop.Interval
stream          the samples in which the position counts, see text.py; null or absent: unknown
adam_step, scheduler                null in a checkpoint of weights only
layout, fp8_state, fingerprint      what a run must share to load it, or parts of it
versions        of torch and megatron-core
files           size and CRC-32 of every other file

Whatever has a checkpoint's name was complete when it got it. Later a disk can damage it, or someone
copies a folder in part, or renames it. A run that continues in its own folder, as a requeued job
does, then takes the checkpoint before. A user who names one checkpoint gets that one or an error.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from moe_parallel.collective_errors import StorageError, agree
from moe_parallel.data.sealed import read_sealed
from moe_parallel.errors import Damaged, InputError
from moe_parallel.reading import open_regular
from moe_parallel.training.checkpoint.folder import (
    RECORD,
    CheckpointFolder,
    checkpoint_name,
    iteration_in_name,
    other_checkpoints,
)
from moe_parallel.training.checkpoint.index import COMMON, TENSOR_INDEX, data_files, read_index

FORMAT = 2

# A continued run keeps its schedule; another one would silently change the learning rate.
SCHEDULE_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters",
    "lr_decay_steps": "--lr-decay-iters (or --train-iters)",
    "lr_decay_style": "--lr-decay-style",
    "end_wd": "--weight-decay",
}
_OTHER_SCHEDULE = (
    "use the values of its config.yaml, or continue with these by --override-opt-param-scheduler"
)


@dataclass(frozen=True)
class Expected:
    """The required properties of a checkpoint."""

    fingerprint: Mapping[str, object]  # facts that it must have
    same_schedule: bool = True  # whether its schedule must equal the configured one
    remedy: str = "use the values of its config.yaml, or load another checkpoint"


def checked_record(
    checkpoint: Path, expected: Expected, scheduler: OptimizerParamScheduler | None
) -> dict[str, Any]:
    """The record of a checkpoint that is as expected; raises InputError that lists differences.

    `scheduler`: its state will be loaded, with that of the optimizer; None: neither.
    """
    record = read_record(checkpoint)
    _compare(checkpoint, record["fingerprint"], as_json(expected.fingerprint), expected.remedy)
    for part, key in (("optimizer", "adam_step"), ("scheduler", "scheduler")):
        if scheduler is not None and record[key] is None:
            raise InputError(
                f"--load {checkpoint}: it has weights, but no state of the {part} to continue "
                "training with; load one that training has saved, or start a new run with its "
                "weights by --finetune"
            )
    if scheduler is not None and expected.same_schedule:
        configured = _schedule(scheduler.state_dict())
        _compare(checkpoint, _schedule(record["scheduler"]), configured, _OTHER_SCHEDULE)
    return record


def read_record(checkpoint: Path) -> dict[str, Any]:
    """The content of checkpoint.json, after checking that every file exists in its full size.

    Raises InputError if the checkpoint is incomplete, or its record is of another iteration than
    its name.
    """
    try:
        record = read_sealed(checkpoint / RECORD)
        if type(record.get("format")) is not int:
            raise ValueError("not the record of a checkpoint")
    except OSError:
        raise torn(checkpoint, f"{RECORD} is missing or unreadable") from None
    except ValueError as error:
        raise torn(checkpoint, f"{RECORD} is damaged ({error})") from None
    if record["format"] != FORMAT:
        raise InputError(
            f"--load {checkpoint}: its format is {record['format']}, and this program reads "
            f"{FORMAT}; load it with the version that wrote it"
        )
    if not _is_record(record):
        raise torn(checkpoint, f"{RECORD} is not the record of a checkpoint")
    saved, named = record["training"]["iteration"], iteration_in_name(checkpoint)
    if named is not None and named != saved:
        raise Damaged(
            f"--load {checkpoint}: it was saved at iteration {saved} and has been renamed; "
            f"rename it to {checkpoint_name(saved)}, or to a name that is not an iteration's"
        )
    check_sizes(checkpoint, record["files"])
    return record


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint has its record and all its files in their full size."""
    try:
        read_record(checkpoint)
    except InputError:
        return False
    return True


def checked_file(checkpoint: Path, name: str) -> Path:
    """The path of a checkpoint's file, after comparison with the record; raises InputError."""
    files = read_record(checkpoint)["files"]
    if name not in files:
        raise torn(checkpoint, f"{name} is missing")
    check_content(checkpoint, {name: files[name]}, slice(None))
    return checkpoint / name


def _is_record(record: Mapping[str, Any]) -> bool:
    """Whether every field is of its type, so that code that reads one need not check it."""
    training: Any = record.get("training")
    files: Any = record.get("files")
    scheduler, step = record.get("scheduler"), record.get("adam_step")
    maps = (training, record.get("layout"), record.get("fingerprint"), files)
    if not all(isinstance(each, dict) for each in maps):
        return False
    unlogged = training.get("unlogged")
    counts = {name: value for name, value in training.items() if name != "unlogged"}
    return (
        counts.keys() == {"iteration", "consumed_samples", "consumed_tokens"}
        and all(_is_count(value) for value in counts.values())
        and (unlogged is None or _is_interval(unlogged))
        and (record.get("stream") is None or _is_stream(record["stream"]))
        and (step is None or _is_count(step))
        and (scheduler is None or _is_schedule(scheduler))
        and (record.get("fp8_state") is None or isinstance(record["fp8_state"], dict))
        and all(_is_file(name, facts) for name, facts in files.items())
    )


def _is_interval(sums: Any) -> bool:
    return isinstance(sums, dict) and _is_count(sums.get("iterations"))


def _is_stream(stream: Any) -> bool:
    try:
        counts = [stream["first"], *stream["ends"]]
        kinds = {"name": str, "weight": int | float | None, "idx": str, "bin": str | None}
        data = [each[key] for each in stream["made_of"]["--data-path"] for key in kinds]
    except (KeyError, TypeError):
        return False
    fits = map(isinstance, data, cycle(kinds.values()))
    return len(counts) > 1 and all(map(_is_count, counts)) and all(fits)


def _is_schedule(state: Any) -> bool:
    return (
        isinstance(state, dict)
        and SCHEDULE_FLAGS.keys() <= state.keys()
        and _is_count(state.get("num_steps"))
    )


def _is_file(name: str, facts: Any) -> bool:
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and name.isprintable()
    described = isinstance(facts, dict) and facts.keys() == {"bytes", "crc32"}
    return inside and described and all(_is_count(value) for value in facts.values())


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def as_json(facts: Mapping[str, object]) -> dict[str, object]:
    """The facts as JSON returns them, so that a tuple equals the list that was saved."""
    return dict(json.loads(json.dumps(dict(facts))))


def _compare(
    checkpoint: Path,
    stored: Mapping[str, object],
    configured: Mapping[str, object],
    remedy: str,
) -> None:
    """Raises InputError that lists every value that differs.

    An older checkpoint may lack a newer option; its tensors are compared later in any case.
    """
    differing = [
        f"{name} is {stored[name]} in the checkpoint and {value} here"
        for name, value in configured.items()
        if name in stored and stored[name] != value
    ]
    if differing:
        raise InputError(f"--load {checkpoint}: {', '.join(differing)}; {remedy}")


def _schedule(state: Mapping[str, object]) -> dict[str, object]:
    """The configured values of a scheduler, by flag."""
    return {flag: state[key] for key, flag in SCHEDULE_FLAGS.items()}


Files: TypeAlias = Mapping[str, Mapping[str, int]]  # by path in the checkpoint: bytes, crc32


def list_files(folder: Path) -> list[str]:
    """Every file of a checkpoint except its record, by its path in the checkpoint, sorted."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Size and CRC-32 of files.

    Reading takes about one second per gigabyte, so each rank reads a share.
    """
    return {
        name: {"bytes": (folder / name).stat().st_size, "crc32": _crc32(folder / name)}
        for name in names
    }


def check_complete(folder: Path, files: Files) -> None:
    """Check that the described `files` are a complete checkpoint and still exist.

    Raises:
        StorageError: another process removed a file, or ranks wrote to different folders.
    """
    needed = {TENSOR_INDEX: 0, COMMON: 0}
    if TENSOR_INDEX in files:
        needed |= data_files(read_index(folder))
    for name, size in needed.items():
        if name not in files:
            raise StorageError(f"{name} is missing: every rank has to write into the same folder")
        if files[name]["bytes"] < size:
            raise StorageError(f"{name} has {files[name]['bytes']} bytes instead of {size}")
    for name, facts in files.items():
        if (folder / name).stat().st_size != facts["bytes"]:
            raise StorageError(f"{name} has changed since it was written")


def check_sizes(checkpoint: Path, files: Files) -> None:
    """Check that every file exists in its full size; raises Damaged."""
    for name, facts in files.items():
        path = checkpoint / name
        if not os.path.isfile(path):  # also for a name that is too long
            raise torn(checkpoint, f"{name[:200]} is missing")
        if path.stat().st_size != facts["bytes"]:
            size = path.stat().st_size
            raise torn(checkpoint, f"{name} has {size} bytes instead of {facts['bytes']}")


def check_content(checkpoint: Path, files: Files, share: slice) -> None:
    """Read a share of the files and compare them with the record; raises Damaged."""
    for name, facts in describe_files(checkpoint, sorted(files)[share]).items():
        if files[name] != facts:
            raise torn(checkpoint, f"{name} is damaged")


def torn(checkpoint: Path, what: str) -> Damaged:
    """The error of a checkpoint that differs from what was saved."""
    others = other_checkpoints(checkpoint)
    remedy = f"load another one: {others}" if others else "it cannot be loaded"
    return Damaged(
        f"--load {checkpoint}: the checkpoint is incomplete or damaged: {what}; {remedy}"
    )


def _crc32(path: Path) -> int:
    crc = 0
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def newest_good(folder: Path) -> tuple[Path, str | None]:
    """The newest checkpoint in a run folder whose files are all unchanged. Collective.

    Every file of it is read, each rank reads a share. Returns the checkpoint and, if it is not the
    newest of all, or the tracker is damaged, what is wrong.

    Raises:
        InputError: on every rank, with the first error, if no checkpoint is good; or if a
            file cannot be read.
    """
    checkpoints = CheckpointFolder(folder)
    first: Damaged | None = None
    try:
        agree(checkpoints.latest)
    except Damaged as error:
        first = error
    for checkpoint in agree(checkpoints.newest_first):
        try:
            _check(checkpoint)
        except Damaged as error:
            first = first or error
        except StorageError as error:  # it may be good, and readable at the next start
            raise InputError(
                f"--load {checkpoint} cannot be read: {error}; check the disk"
            ) from error
        else:
            wrong = None if first is None else str(first).rpartition("; ")[0]
            return checkpoint, wrong
    raise first or InputError(f"--load {folder}: no checkpoint here; remove --load to start anew")


def _check(checkpoint: Path) -> None:
    record = agree(lambda: read_record(checkpoint))
    agree(lambda: check_content(checkpoint, record["files"], rank_share()))


def rank_share() -> slice:
    """The part of a checkpoint's files that this rank reads and checks."""
    return slice(dist.get_rank(), None, dist.get_world_size())
