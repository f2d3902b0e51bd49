"""Files and folders that are published completely or not at all, and a lock."""

import errno
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def flush_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a small file under a temporary name, then give it its name.

    An OSError names `path`; the temporary file is gone then.
    """
    temporary = path.with_name(f"{path.name}.writing-{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        flush_to_disk(temporary)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        error.filename = str(path)
        raise


def remove(path: Path) -> None:
    """Delete a folder as far as possible, or a link, but never what a link points to.

    A folder in which another file system is mounted stays whole.

    Raises OSError, if something is left, about the first thing that is in the way.
    """
    if path.is_symlink():
        path.unlink()
        return
    if path.exists() and not path.is_dir():  # rmtree would open it, which waits at a pipe
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    for folder, _, _ in os.walk(path):
        if os.path.ismount(folder):
            raise OSError(errno.EBUSY, "unmount the file system there first", folder)
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        shutil.rmtree(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path` exclusively; the kernel releases it if the process is killed.

    Raises:
        OSError: the file cannot be created (its folder is read-only or full).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `target`; on success it is renamed to `target`.

    The caller holds a lock, so incomplete folders of killed processes can be deleted here.
    """
    stem = f".{target.name}.building-"
    for abandoned in target.parent.glob(f"{stem}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=stem, dir=target.parent))
    try:
        yield temporary
        for path in temporary.rglob("*"):
            flush_to_disk(path)
        temporary.chmod(0o755)  # mkdtemp gives access to the owner only
        os.replace(temporary, target)
        flush_to_disk(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def staging(beside: Path) -> Iterator[Path]:
    """A hidden temporary folder next to a path, so on the same disk, for files to be renamed.

    At the end it is removed with everything that is still in it. Meanwhile SIGTERM raises
    KeyboardInterrupt, as Ctrl-C does, so that it removes the folder, too. SIGKILL leaves it.
    """
    beside.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{beside.name}.writing-", dir=beside.parent))
    try:
        with _handled({signal.SIGTERM: signal.default_int_handler}):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM, for renames that are to happen all or not at all."""
    with _handled({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        yield


@contextmanager
def _handled(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # has no say in signals
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
