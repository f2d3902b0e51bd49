"""A lock, so that only one run at a time writes to a folder.

Two runs would publish checkpoints under the same names and delete each other's. The lock is
flock's. The kernel (on NFS the server) releases it when its process ends for any reason, so no
lock is left behind, and a restarted run can take it again. A job that was started again may come
while its predecessor is still ending, for example on a node that Slurm cannot reach: it waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from moe_parallel.collective_errors import on_rank_0, one_line
from moe_parallel.errors import Busy, InputError

LOCK = "run.lock"  # contains the host and the process of the run that has the lock
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


#: Counts of earlier starts: of a job by Slurm, of its ranks by a launcher.
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_PATIENCE_SECONDS, _LOOK_SECONDS = 60.0, 0.5


def patience(environment: Mapping[str, str], hang_timeout: float | None) -> float:
    """How long this start waits for the lock, in seconds; 0 unless the job was started again.

    Other ranks wait meanwhile, so it is at most half of --hang-timeout (None: no limit).
    """
    if not any(int(environment.get(name) or 0) for name in _RESTARTS):
        return 0.0
    return min(_PATIENCE_SECONDS, hang_timeout / 2 if hang_timeout else _PATIENCE_SECONDS)


@contextmanager
def locked_folder(save: str | None, patience: float = 0.0) -> Iterator[list[str]]:
    """Lock --save against other runs; yields warnings to print. Collective.

    Rank 0 holds the lock for all ranks, from before the first file is written until the end.

    `patience`: seconds to wait for another run to leave the folder.

    Raises:
        Busy: on every rank, if another run still uses the folder after a wait.
        InputError: on every rank, if another run uses the folder or it cannot be written.
    """
    warnings: list[str] = []
    with ExitStack() as held:
        if save is not None:
            on_rank_0(lambda: warnings.extend(held.enter_context(run_lock(Path(save), patience))))
        yield warnings


@contextmanager
def run_lock(folder: Path, patience: float = 0.0) -> Iterator[list[str]]:
    """Lock a folder from this process alone; yields warnings to print.

    Raises InputError, or Busy after a wait; see `locked_folder`.
    """
    is_new = not folder.exists()
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, has_lock = _take(path, patience)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise InputError(
            f"--save {folder} cannot be written ({one_line(error)}): "
            "name a folder on a disk with room"
        ) from error
    unlocked = (
        f"the file system of --save {folder} has no locks: take care that no other run writes there"
    )
    try:
        yield [] if has_lock else [unlocked]
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # while it is still locked: see `_take`
            if is_new:
                folder.rmdir()  # succeeds only if the run was refused and the folder is empty
        file.close()


def _take(path: Path, patience: float) -> tuple[IO[str], bool]:
    """The lock file, and whether it could be locked; raises InputError if another run keeps it."""
    deadline, told = time.monotonic() + patience, False
    while True:
        # What a link points to would be emptied.
        file = open(
            path, "a+", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)
        )
        try:
            has_lock = _lock(file)
            # A run that ends removes its file. A lock on a removed file excludes no other run.
            if has_lock and not (
                path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
            ):
                file.close()
                continue
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            return file, has_lock
        except BlockingIOError:
            file.seek(0)
            holder = " ".join(file.read(300).split()) or "it has just begun"
            file.close()
        except BaseException:
            file.close()
            raise
        wrong = f"--save {path.parent}: another run is writing there ({holder})"
        if patience == 0:
            raise InputError(f"{wrong}: end it, wait for it, or name another folder")
        if time.monotonic() >= deadline:
            late = f"has not ended in {patience:.0f} s: start the same command again"
            raise Busy(f"{wrong} and {late}")
        if not told:
            waiting = f"waiting for an earlier start to end ({holder}), at most {patience:.0f} s"
            print(f"--save {path.parent}: {waiting}", file=sys.stderr, flush=True)
        told = True
        time.sleep(_LOOK_SECONDS)


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True
