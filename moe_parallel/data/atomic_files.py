"""Files and folders that are published completely or not at all, and a lock."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def flush_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file under a temporary name, then give it its name."""
    temporary = path.with_name(f"{path.name}.writing-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    flush_to_disk(temporary)
    os.replace(temporary, path)


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
    """Yield a temporary folder beside `target`; on success it is renamed to `target`.

    The caller holds a lock, so incomplete folders of killed processes can be deleted here.
    """
    stem = f".{target.name}.building-"
    for abandoned in target.parent.glob(f"{stem}*"):
        shutil.rmtree(abandoned)
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
