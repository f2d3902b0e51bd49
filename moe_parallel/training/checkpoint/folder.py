"""The folder of checkpoints: the files on disk, and how a checkpoint is published atomically.

    DIR/latest_checkpointed_iteration.txt   the iteration of the newest checkpoint
    DIR/iter_0000010/                       a checkpoint; it never changes once it has this name
        checkpoint.json                     written last: see record.py
        metadata.json common.pt .metadata *.distcp        Megatron-Core's torch_dist format
        config.yaml tokenizer/ ...          small files, stored with the weights
    DIR/.iter_0000010.writing               being written; left behind by a killed save
    DIR/.iter_0000010.old                   about to be deleted

The last two names get a number where something that cannot be deleted has the plain one.

Everything here is file operations of one process. Renames within a folder are atomic, and files
and folders are flushed to the disk before the rename that makes them visible.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_parallel.collective_errors import one_line
from moe_parallel.data.atomic_files import flush_to_disk, remove, write_atomically
from moe_parallel.data.sealed import write_sealed
from moe_parallel.errors import Damaged, InputError

TRACKER = "latest_checkpointed_iteration.txt"
RECORD = "checkpoint.json"
_NAME = re.compile(r"iter_([0-9]{7,})")
_ITERATION = re.compile(r"[0-9]{1,18}")
_LEFTOVER = re.compile(r"\.iter_([0-9]{7,})\.(writing|old)[0-9]*")


def checkpoint_name(iteration: int) -> str:
    """`iter_0000010`, Megatron's name for iteration 10."""
    return f"iter_{iteration:07d}"


class CheckpointFolder:
    """The checkpoints under one directory. Errors are OSErrors unless a method says otherwise.

    Deleting stops no save and follows no link: `stuck` has the paths that could not be deleted or
    renamed, with the reason.
    """

    def __init__(self, directory: Path):
        self.directory = Path(directory)
        self.stuck: dict[Path, str] = {}

    def published_path(self, iteration: int) -> Path:
        """The checkpoint of `iteration` once it is published."""
        return self.directory / checkpoint_name(iteration)

    def begin(self, iteration: int) -> Path:
        """Create an empty folder to write to, and delete the remains of killed saves."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.tidy()
        self._writing = self._hidden(iteration, "writing")
        self._writing.mkdir()
        return self._writing

    def publish(self, iteration: int, record: Mapping[str, Any], keep_last: int | None) -> Path:
        """Give the checkpoint that was begun its name, update the tracker, delete the oldest ones.

        At least one earlier checkpoint stays, whatever `keep_last` is, until `delete_oldest` is
        called: the run may diverge from the new one.

        `record` is written to checkpoint.json, with a checksum.
        """
        writing = self._writing
        write_sealed(writing / RECORD, record)
        for path in (writing, *writing.rglob("*")):
            flush_to_disk(path)

        published = self.published_path(iteration)
        if os.path.lexists(published):
            published.rename(self._hidden(iteration, "old"))
        writing.rename(published)
        flush_to_disk(self.directory)
        write_atomically(self.directory / TRACKER, f"{iteration}\n")
        flush_to_disk(self.directory)
        self.tidy()
        if keep_last is not None:
            self.delete_oldest(iteration, max(2, keep_last))
        return published

    def latest(self) -> Path | None:
        """The checkpoint that the tracker names; None if there is none.

        Without a tracker it is the newest one: a save may be killed before it writes the first
        tracker, and whatever has a checkpoint's name is complete.

        Raises Damaged if the tracker names no iteration, or a checkpoint that does not exist.
        """
        text = self._tracker()
        if text is None:
            return next(reversed(self.paths()), None)
        if not _ITERATION.fullmatch(text):
            raise Damaged(
                f"--load {self.directory}: {TRACKER} says {text[:40]!r} instead of an iteration; "
                "write the iteration of a checkpoint there, or name one: "
                f"--load {self.directory}/iter_..."
            )
        name = checkpoint_name(int(text))
        old = sorted(self.directory.glob(f".{name}.old*"), reverse=True)
        for path in (self.directory / name, *old):
            if os.path.isdir(path):  # .old: a save was killed while it replaced a checkpoint
                return path
        raise Damaged(
            f"--load {self.directory}: {TRACKER} says {text}, but {name} is "
            f"not there; name another checkpoint: {_names(self.iterations()) or 'there is none'}"
        )

    def newest_first(self) -> list[Path]:
        """The checkpoint that `latest` returns, then those of earlier iterations.

        All checkpoints, if the tracker is damaged.
        """
        try:
            latest = self.latest()
        except Damaged:
            return self.paths()[::-1]
        if latest is None:
            return []
        newest = iteration_in_name(latest) or 0
        earlier = [iteration for iteration in self.iterations() if iteration < newest]
        return [latest, *map(self.published_path, reversed(earlier))]

    def iterations(self) -> list[int]:
        """The iterations of the published checkpoints, ascending."""
        # Path.is_dir would raise for a link to a disk that is gone.
        names = [path.name for path in self.directory.glob("iter_*") if os.path.isdir(path)]
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def paths(self) -> list[Path]:
        """The published checkpoints, in the order of their iterations."""
        return [self.published_path(iteration) for iteration in self.iterations()]

    def tidy(self) -> None:
        """Delete unfinished checkpoints, and those about to be deleted; never fails.

        A checkpoint whose replacement was killed gets its name back.
        """
        tracked = f"iter_{(self._tracker() or '').zfill(7)}"
        for path in sorted(self.directory.glob(".iter_*"), reverse=True):  # the last .old first
            if match := _LEFTOVER.fullmatch(path.name):
                published = self.published_path(int(match[1]))
                gone = match[2] == "old" and not os.path.exists(published)
                with self._noting(path):
                    if gone and published.name == tracked:
                        path.rename(published)
                    else:
                        remove(path)

    @contextmanager
    def _noting(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.stuck[path] = one_line(error).removeprefix(f"{path}: ")

    def _hidden(self, iteration: int, kind: str) -> Path:
        """A free path of this kind."""
        path = plain = self.directory / f".{checkpoint_name(iteration)}.{kind}"
        number = 2
        while os.path.lexists(path):
            path = plain.with_name(f"{plain.name}{number}")
            number += 1
        return path

    def _tracker(self) -> str | None:
        """The tracker's first 100 bytes, enough for an iteration; None: there is no tracker."""
        tracker = self.directory / TRACKER
        if not os.path.isfile(tracker):
            return None
        try:
            with tracker.open("rb") as file:
                return file.read(100).decode("utf-8", "backslashreplace").strip()
        except OSError as error:
            return error.strerror or ""  # which names no iteration

    def delete_oldest(self, newest: int, keep_last: int) -> None:
        """Delete all but the checkpoint of iteration `newest` and `keep_last - 1` others.

        If the run went back to an earlier iteration, checkpoints of the abandoned iterations, which
        have higher iterations, are deleted first. A checkpoint is renamed before it is deleted, so
        that a kill leaves no incomplete one. Never fails.
        """
        others = [i for i in self.iterations() if i != newest]
        others.sort(key=lambda iteration: (iteration > newest, -iteration))
        for iteration in others[keep_last - 1 :]:
            published = self.published_path(iteration)
            with self._noting(published):
                published.rename(self._hidden(iteration, "old"))
        self.tidy()


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `--load path` names: `path` itself, or the latest in that folder.

    Raises InputError if there is none.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"--load {path}: there is no such folder; check the path")
    if not path.is_dir():
        raise InputError(
            f"--load {path}: this is a file; name the folder given to --save, or an iter_... in it"
        )
    if (path / RECORD).exists() or _NAME.fullmatch(path.name):
        return path
    latest = CheckpointFolder(path).latest()
    if latest is None:
        raise InputError(
            f"--load {path}: no checkpoint here (there is no {TRACKER}); name the folder given to "
            "--save, or remove --load to start a new run; if --save names the same folder, a new "
            "run starts automatically"
        )
    return latest


def copy_files(files: Mapping[str, str | Path], target: Path) -> None:
    """Copy small files to the checkpoint: a str is the text, a Path the file or folder to copy."""
    for name, source in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, str):
            (target / name).write_text(source, encoding="utf-8")
        elif source.is_dir():
            shutil.copytree(source, target / name)
        else:
            shutil.copyfile(source, target / name)


def iteration_in_name(checkpoint: Path) -> int | None:
    """The iteration in the name of a checkpoint's folder; None: the name is not of that form."""
    name = checkpoint.resolve().name
    match = _NAME.fullmatch(name) or _LEFTOVER.fullmatch(name)
    return int(match[1]) if match else None


def other_checkpoints(checkpoint: Path) -> str:
    """The newest three other checkpoints in the same folder, for a message; "" if there is none."""
    iterations = CheckpointFolder(checkpoint.parent).iterations()
    return _names([i for i in iterations if checkpoint_name(i) != checkpoint.name])


def _names(iterations: list[int]) -> str:
    return ", ".join(checkpoint_name(i) for i in iterations[-3:])
