"""The folder of checkpoints: the files on disk, and how a checkpoint is published atomically.

    DIR/latest_checkpointed_iteration.txt   the iteration of the newest checkpoint
    DIR/iter_0000010/                       a checkpoint; it never changes once it has this name
        checkpoint.json                     written last: see record.py
        metadata.json common.pt .metadata *.distcp        Megatron-Core's torch_dist format
        config.yaml tokenizer/ ...          small files, stored with the weights
    DIR/.iter_0000010.writing               being written; left behind by a killed save
    DIR/.iter_0000010.old                   about to be deleted

Everything here is file operations of one process. Renames within a folder are atomic, and files
and folders are flushed to the disk before the rename that makes them visible.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_parallel.data.atomic_files import flush_to_disk, write_atomically
from moe_parallel.data.sealed import write_sealed
from moe_parallel.errors import InputError

TRACKER = "latest_checkpointed_iteration.txt"
RECORD = "checkpoint.json"
_NAME = re.compile(r"iter_([0-9]{7,})")
_ITERATION = re.compile(r"[0-9]{1,18}")
_LEFTOVER = re.compile(r"\.iter_([0-9]{7,})\.(writing|old)")


def checkpoint_name(iteration: int) -> str:
    """`iter_0000010`, Megatron's name for iteration 10."""
    return f"iter_{iteration:07d}"


class CheckpointFolder:
    """The checkpoints under one directory. Errors are OSErrors unless a method says otherwise."""

    def __init__(self, directory: Path):
        self.directory = Path(directory)

    def writing_path(self, iteration: int) -> Path:
        """The folder in which the checkpoint of `iteration` is written until it is published."""
        return self.directory / f".{checkpoint_name(iteration)}.writing"

    def published_path(self, iteration: int) -> Path:
        """The checkpoint of `iteration` once it is published."""
        return self.directory / checkpoint_name(iteration)

    def begin(self, iteration: int) -> Path:
        """Create an empty folder to write to, and delete the remains of killed saves."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clear_leftovers()
        writing = self.writing_path(iteration)
        writing.mkdir()
        return writing

    def abandon(self, iteration: int) -> None:
        """Free the disk space of an unfinished checkpoint; never fails."""
        shutil.rmtree(self.writing_path(iteration), ignore_errors=True)

    def publish(self, iteration: int, record: Mapping[str, Any], keep_last: int | None) -> Path:
        """Give the written checkpoint its name, update the tracker, delete the oldest checkpoints.

        At least one earlier checkpoint stays, whatever `keep_last` is, until `delete_oldest` is
        called: the run may diverge from the new one.

        `record` is written to checkpoint.json, with a checksum.
        """
        writing = self.writing_path(iteration)
        write_sealed(writing / RECORD, record)
        for path in (writing, *writing.rglob("*")):
            flush_to_disk(path)

        published = self.published_path(iteration)
        if published.exists():
            published.rename(self._old_path(iteration))
        writing.rename(published)
        flush_to_disk(self.directory)
        write_atomically(self.directory / TRACKER, f"{iteration}\n")
        flush_to_disk(self.directory)
        self._clear_leftovers()
        if keep_last is not None:
            self.delete_oldest(iteration, max(2, keep_last))
        return published

    def latest(self) -> Path | None:
        """The checkpoint that the tracker names; None if there is none.

        Without a tracker it is the newest one: a save may be killed before it writes the first
        tracker, and whatever has a checkpoint's name is complete.

        Raises InputError if the tracker is unreadable or names a checkpoint that does not exist.
        """
        text = self._tracker()
        if text is None:
            found = self.iterations()
            return self.directory / checkpoint_name(found[-1]) if found else None
        if not _ITERATION.fullmatch(text):
            raise InputError(
                f"--load {self.directory}: {TRACKER} says {text[:40]!r} instead of an iteration; "
                "write the iteration of a checkpoint there, or name one: "
                f"--load {self.directory}/iter_..."
            )
        for path in (self.directory / checkpoint_name(int(text)), self._old_path(int(text))):
            if path.is_dir():  # .old: a save was killed while it replaced a checkpoint
                return path
        raise InputError(
            f"--load {self.directory}: {TRACKER} says {text}, but {checkpoint_name(int(text))} is "
            f"not there; name another checkpoint: {_names(self.iterations()) or 'there is none'}"
        )

    def newest_first(self) -> list[Path]:
        """The checkpoint that `latest` returns, then those of earlier iterations."""
        latest = self.latest()
        if latest is None:
            return []
        newest = iteration_in_name(latest) or 0
        earlier = [iteration for iteration in self.iterations() if iteration < newest]
        return [latest, *(self.directory / checkpoint_name(i) for i in reversed(earlier))]

    def iterations(self) -> list[int]:
        """The iterations of the published checkpoints, ascending."""
        found = (_NAME.fullmatch(path.name) for path in self.directory.glob("iter_*"))
        return sorted(int(match[1]) for match in found if match)

    def paths(self) -> list[Path]:
        """The published checkpoints, in the order of their iterations."""
        return [self.published_path(iteration) for iteration in self.iterations()]

    def _old_path(self, iteration: int) -> Path:
        return self.directory / f".{checkpoint_name(iteration)}.old"

    def _clear_leftovers(self) -> None:
        for path in list(self.directory.iterdir()):
            if _LEFTOVER.fullmatch(path.name):
                published = self.directory / path.name[1:].removesuffix(".old")
                if path.suffix == ".old" and not published.exists() and self._tracked(published):
                    path.rename(published)
                else:
                    shutil.rmtree(path)

    def _tracker(self) -> str | None:
        """The tracker's first 100 bytes, enough for an iteration; None: there is no tracker."""
        tracker = self.directory / TRACKER
        if not tracker.is_file():
            return None
        with tracker.open("rb") as file:
            return file.read(100).decode("utf-8", "backslashreplace").strip()

    def _tracked(self, published: Path) -> bool:
        text = self._tracker() or ""
        return bool(_ITERATION.fullmatch(text)) and published.name == checkpoint_name(int(text))

    def delete_oldest(self, newest: int, keep_last: int) -> None:
        """Delete all but the checkpoint of iteration `newest` and `keep_last - 1` others.

        If the run went back to an earlier iteration, checkpoints of the abandoned iterations, which
        have higher iterations, are deleted first. A checkpoint is renamed before it is deleted, so
        that a kill leaves no incomplete one.
        """
        others = [i for i in self.iterations() if i != newest]
        others.sort(key=lambda iteration: (iteration > newest, -iteration))
        for iteration in others[keep_last - 1 :]:
            old = self._old_path(iteration)
            (self.directory / checkpoint_name(iteration)).rename(old)
            shutil.rmtree(old)


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
        if isinstance(source, str):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
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
