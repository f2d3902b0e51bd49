"""The lock of a study's folder: one command trains or changes it at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from schedule import Part

from moe_parallel.analysis.study.folder import StudyFolder
from moe_parallel.errors import InputError


@contextmanager
def alone(folder: StudyFolder, part: Part | None = None) -> Iterator[None]:
    """Lock the folder, or a part, so that a second command cannot train the same runs.

    Raises InputError if another command has it.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with (folder.path / ".lock").open("a") as whole:
            fcntl.flock(whole, (fcntl.LOCK_EX if part is None else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            name = ".lock" if part is None else f".lock-{part.first}-of-{part.number}"
            with (folder.path / name).open("a") as lock:
                if part is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield
    except BlockingIOError:
        raise InputError(
            f"--output {folder.path} is in use by another command: wait for it, or name another "
            "folder"
        ) from None
