"""The folder of Megatron's cached indices: complete and unchanged, or rebuilt.

Megatron-Core names these files by what they are computed from. It accepts incomplete and edited
files, and reads them with numpy's `allow_pickle=True`, so a file that is a pickle could execute
code. Here `complete.json`, written last, lists the files with their checksums, and rank 0 compares
them before any rank reads. They depend on the data only: a folder that fails the comparison is
rebuilt, with the same bytes.
"""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from moe_parallel.data.atomic_files import locked, remove
from moe_parallel.data.sealed import file_digest, read_sealed, write_sealed
from moe_parallel.errors import InputError

_RECORD = "complete.json"


class IndexCache:
    """A folder in which Megatron writes indices and finds them again.

    Attributes:
        folder: the path of that folder.
        warning: on rank 0, what was wrong with the earlier content; None: nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warning: str | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Megatron may use the folder inside this context. Called by every rank.

        Ranks other than 0 need no lock: they read after rank 0 has built.

        Raises:
            InputError: the folder cannot be written, or a file of the data cannot be read.
        """
        if dist.is_initialized() and dist.get_rank() != 0:
            with _files_told(self.folder):
                yield
            return
        with ExitStack() as lock:
            with _cache_told(self.folder):
                lock.enter_context(locked(self.folder.with_name(f"{self.folder.name}.lock")))
                wrong = self._wrong()
                if wrong is not None:
                    remove(self.folder)
            with _files_told(self.folder):
                yield
            if wrong is not None:
                with _cache_told(self.folder):
                    self.folder.mkdir(exist_ok=True)
                    write_sealed(self.folder / _RECORD, {"files": self._files()})

    def _wrong(self) -> str | None:
        """The reason why the folder cannot be used; None if it can."""
        record = self.folder / _RECORD
        if not record.is_file():
            return "it is not complete"  # never built, or its build was killed
        try:
            whole = read_sealed(record).get("files") == self._files()
        except ValueError:
            whole = False
        if not whole or not all(map(_is_array, self.folder.glob("*.npy"))):
            self.warning = f"the indices in {self.folder} were damaged: they are built again"
            return self.warning
        return None

    def _files(self) -> dict[str, str]:
        """The digest of every file except the record, by name."""
        others = (path for path in self.folder.iterdir() if path.name != _RECORD)
        return {path.name: file_digest(path) for path in sorted(others)}


def _is_array(path: Path) -> bool:
    """Whether numpy finds an array of integers; otherwise it would try to load a pickle."""
    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception:  # arbitrary bytes may cause any error
        return False
    return isinstance(array, np.ndarray) and array.dtype.kind in "iu"


@contextmanager
def _cache_told(folder: Path) -> Iterator[None]:
    """Convert an OSError in the block to the error of a cache that cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--data-cache-path {folder.parent} cannot be written ({error.strerror or error}): "
            "name a folder on a disk with room"
        ) from None


@contextmanager
def _files_told(folder: Path) -> Iterator[None]:
    """Convert an OSError in the block to an error about the file that it names or a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise InputError(
                f"{error.filename} cannot be opened ({error.strerror}): every rank reads what "
                "--data-path names, and the --data-cache-path that rank 0 writes"
            ) from None
        # numpy's error about an array that it wrote only in part has no errno.
        if error.errno in (None, errno.ENOSPC, errno.EDQUOT):
            with _cache_told(folder):
                raise
        raise
