"""Arrays on the disk that are computed once: finished work that is found is not repeated."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from moe_parallel.reading import open_regular


class Scratch:
    """A folder of arrays, each named by what it was computed from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def arrays(
        self,
        name: str,
        made_from: Sequence[object],
        shapes: Sequence[tuple[tuple[int, ...], type]],
        make: Callable[..., object],
    ) -> list[np.ndarray]:
        """Read-only memory maps of arrays that `make(*arrays)` fills, unless they exist.

        They get their names when all are filled, so an interrupted `make` starts anew. It also
        starts anew if the files are not arrays of those shapes and types.

        Args:
            name: of the files.
            made_from: everything that the content depends on.
            shapes: shape and type of each array.
            make: called with the arrays to fill.
        """
        digest = hashlib.sha256(repr([*made_from, *shapes]).encode()).hexdigest()[:16]
        final = [self.folder / f"{name}{i}-{digest}.npy" for i in range(len(shapes))]
        found = [_found(path, *of) for path, of in zip(final, shapes, strict=True)]
        if any(array is None for array in found):
            writing = [path.with_name(f"{path.name}.writing-{os.getpid()}") for path in final]
            try:
                outs = [
                    _new_array(path, shape, dtype)
                    for path, (shape, dtype) in zip(writing, shapes, strict=True)
                ]
                make(*outs)
                for out in outs:
                    out.flush()
                for temporary, path in zip(writing, final, strict=True):
                    os.replace(temporary, path)
            finally:
                for temporary in writing:
                    temporary.unlink(missing_ok=True)
            found = [_found(path, *of) for path, of in zip(final, shapes, strict=True)]
        return [array for array in found if array is not None]


def _found(path: Path, shape: tuple[int, ...], dtype: type) -> np.ndarray | None:
    """The array in a file; None if there is no such file, or its content is something else."""
    try:
        open_regular(path).close()
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except OSError:
        raise
    except Exception:  # arbitrary bytes may cause any error
        return None
    fits = isinstance(array, np.ndarray) and (array.shape, array.dtype) == (shape, dtype)
    return array if fits else None


def _new_array(path: Path, shape: tuple[int, ...], dtype: type) -> np.memmap:
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    # A full disk raises an error now; later, writing to a memory map, it would kill the process.
    with path.open("r+b") as stream:
        os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)
    return array


@contextmanager
def scratch(folder: Path | None, beside: Path) -> Iterator[Scratch]:
    """`folder`, kept for the next time; if it is None, a temporary folder next to `beside`."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield Scratch(folder)
        return
    beside.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{beside.name}.ordering-", dir=beside.parent))
    try:
        yield Scratch(temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
