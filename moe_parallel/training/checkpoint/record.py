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
Files: TypeAlias = Mapping[str, Mapping[str, int]]  # by path in the checkpoint: bytes, crc32


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
    if scheduler is None:
        return record
    for part, key in (("optimizer", "adam_step"), ("scheduler", "scheduler")):
        if record[key] is None:
            raise InputError(
                f"--load {checkpoint}: it has weights, but no state of the {part} to continue "
                "training with; load one that training has saved, or start a new run with its "
                "weights by --finetune"
            )
    if expected.same_schedule:
        stored, configured = (
            {flag: state[key] for key, flag in SCHEDULE_FLAGS.items()}
            for state in (record["scheduler"], scheduler.state_dict())
        )
        _compare(checkpoint, stored, configured, _OTHER_SCHEDULE)
    return record


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
    for name, facts in record["files"].items():
        path = checkpoint / name
        if not os.path.isfile(path):  # also for a name that is too long
            raise torn(checkpoint, f"{name[:200]} is missing")
        if (size := path.stat().st_size) != facts["bytes"]:
            raise torn(checkpoint, f"{name} has {size} bytes instead of {facts['bytes']}")
    return record


def _is_record(record: Mapping[str, Any]) -> bool:
    """Whether what is read of a record later is of its type: anyone can write a checksum."""
    try:
        training, files = record["training"], record["files"]
        stream, scheduler = record.get("stream"), record.get("scheduler")
        maps = [record["layout"], record["fingerprint"], record.get("fp8_state") or {}, files]
        counts = [training[key] for key in ("iteration", "consumed_samples", "consumed_tokens")]
        counts += [] if record.get("adam_step") is None else [record["adam_step"]]
        counts += [facts[key] for facts in files.values() for key in ("bytes", "crc32")]
        fits = scheduler is None or SCHEDULE_FLAGS.keys() <= scheduler.keys()
        counts += [] if scheduler is None else [scheduler["num_steps"]]
        if stream is not None:
            counts += [stream["first"], stream["ends"][0], *stream["ends"]]
            for data in stream["made_of"]["--data-path"]:
                own = data["name"], data["idx"], data["bin"] or "", data["weight"] or 0
                fits &= all(map(isinstance, own, (str, str, str, int | float)))
    except (LookupError, TypeError, AttributeError):
        return False
    fits &= all(isinstance(each, dict) for each in maps) and all(map(_stays_inside, files))
    return fits and all(type(each) is int and 0 <= each < 2**63 for each in counts)


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and name.isprintable()


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint has its record and all its files in their full size."""
    try:
        read_record(checkpoint)
    except InputError:
        return False
    return True


def torn(checkpoint: Path, what: str) -> Damaged:
    """The error of a checkpoint that differs from what was saved."""
    others = other_checkpoints(checkpoint)
    remedy = f"load another one: {others}" if others else "it cannot be loaded"
    return Damaged(
        f"--load {checkpoint}: the checkpoint is incomplete or damaged: {what}; {remedy}"
    )


def checked_file(checkpoint: Path, name: str) -> Path:
    """The path of a checkpoint's file, after comparison with the record; raises InputError."""
    files = read_record(checkpoint)["files"]
    if name not in files:
        raise torn(checkpoint, f"{name} is missing")
    check_content(checkpoint, {name: files[name]}, slice(None))
    return checkpoint / name


def list_files(folder: Path) -> list[str]:
    """Every file of a checkpoint except its record, by its path in the checkpoint, sorted."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Size and CRC-32 of files.

    Reading takes about one second per gigabyte, so each rank reads a share.
    """
    described = {}
    for name in names:
        crc = 0
        with open_regular(folder / name) as file:
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
        described[name] = {"bytes": (folder / name).stat().st_size, "crc32": crc}
    return described


def rank_share() -> slice:
    """The part of a checkpoint's files that this rank reads and checks."""
    return slice(dist.get_rank(), None, dist.get_world_size())


def check_content(checkpoint: Path, files: Files, share: slice) -> None:
    """Read a share of the files and compare them with the record; raises Damaged."""
    for name, facts in describe_files(checkpoint, sorted(files)[share]).items():
        if files[name] != facts:
            raise torn(checkpoint, f"{name} is damaged")


def check_complete(folder: Path, files: Files) -> None:
    """Check that the described `files` contain all that the index refers to.

    Raises StorageError: ranks wrote to different folders, or another process removed a file.
    """
    needed = {TENSOR_INDEX: 0, COMMON: 0}
    if TENSOR_INDEX in files:
        needed |= data_files(read_index(folder))
    for name, size in needed.items():
        if name not in files:
            raise StorageError(f"{name} is missing: every rank has to write into the same folder")
        if files[name]["bytes"] < size:
            raise StorageError(f"{name} has {files[name]['bytes']} bytes instead of {size}")


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
