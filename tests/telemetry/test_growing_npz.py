"""An .npz file that grows: what NumPy reads at any moment, and what a full disk leaves."""

import errno
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_parallel.telemetry import growing_npz
from moe_parallel.telemetry.growing_npz import GrowingNpz, joined_crc32, mapped, padded

SMALL = np.dtype([("number", "<i8"), ("values", "<i2", (3,))])  # smaller than a directory
LARGE = np.dtype([("number", "<i8"), ("values", "<i2", (5000,))])


def file_of(path: Path, kind: np.dtype[Any]) -> GrowingNpz:
    return GrowingNpz(path, {"size": np.array(7), "names": np.array(["a", "bc"])}, "rows", kind)


def row(kind: np.dtype[Any], number: int) -> np.ndarray[Any, Any]:
    made = np.zeros(1, kind)
    made["number"] = number
    made["values"] = np.arange(kind["values"].shape[0]) * number
    return made


def written(path: Path, kind: np.dtype[Any], *numbers: int) -> GrowingNpz:
    growing = file_of(path, kind)
    growing.begin()
    for number in numbers:
        growing.append(row(kind, number))
    return growing


def numbers(path: Path) -> list[int]:
    """Those that NumPy reads. All arrays must be whole."""
    arrays = np.load(path)
    assert arrays["size"] == 7 and arrays["names"].tolist() == ["a", "bc"]
    rows = arrays["rows"]
    for number, values in rows:
        assert values.tolist() == [number * place for place in range(len(values))]
    for name in ("number", "values"):
        assert np.array_equal(mapped(path, "rows")[name], rows[name])
    return list(rows["number"].tolist())


@pytest.mark.parametrize("kind", [SMALL, LARGE], ids=["small", "large"])
def test_numpy_and_others_read_it_after_each_row(tmp_path: Path, kind: np.dtype[Any]) -> None:
    path = tmp_path / "file.npz"
    growing = written(path, kind)
    assert numbers(path) == []
    for number in range(1, 5):
        growing.append(row(kind, number))
        assert numbers(path) == list(range(1, number + 1))
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None  # the CRC-32 of all members
            assert archive.namelist() == ["size.npy", "names.npy", "rows.npy"]


@pytest.mark.parametrize("kind", [SMALL, LARGE], ids=["small", "large"])
def test_it_goes_on_with_the_same_bytes(tmp_path: Path, kind: np.dtype[Any]) -> None:
    whole, path = tmp_path / "whole.npz", tmp_path / "file.npz"
    written(whole, kind, 1, 2, 3, 4)
    for kept in range(4):
        written(path, kind, 1, 2, 3)
        growing = file_of(path, kind)
        assert growing.made(mapped(path, "rows"))
        growing.keep(kept)
        assert numbers(path) == list(range(1, kept + 1))
        for number in range(kept + 1, 5):
            growing.append(row(kind, number))
        assert path.read_bytes() == whole.read_bytes()


def test_a_file_that_is_shorter_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    written(path, LARGE, 1)
    with pytest.raises(OSError, match=r"file.npz has fewer than 3 rows"):
        file_of(path, LARGE).keep(3)


class Writes:
    """The writes of a process that does not survive them all.

    Of the write that is the last, half of the bytes arrive.
    """

    def __init__(self, survived: int, error: BaseException) -> None:
        self.left, self.error, self.write = survived, error, growing_npz._write

    def __call__(self, file: Any, place: int, data: bytes) -> None:
        if not self.left:
            self.write(file, place, data[: len(data) // 2] if len(data) > 4096 else b"")
            self.left -= 1  # what comes after may write again
            raise self.error
        self.left -= 1
        self.write(file, place, data)


class Killed(BaseException):
    """The end of a process, after which it writes nothing."""


@pytest.mark.parametrize("survived", [0, 1, 2, 3])
def test_a_process_may_be_killed_between_any_two_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    """A write of a few hundred bytes is whole or not there; that of a row may be cut."""
    path = tmp_path / "file.npz"
    growing = written(path, LARGE, 1, 2)
    before = numbers(path)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(growing_npz, "_write", Writes(survived, Killed()))
        growing.append(row(LARGE, 3))
    assert numbers(path) == before == [1, 2]
    again = file_of(path, LARGE)
    again.keep(2)
    again.append(row(LARGE, 3))
    written(tmp_path / "whole.npz", LARGE, 1, 2, 3)
    assert path.read_bytes() == (tmp_path / "whole.npz").read_bytes()


@pytest.mark.parametrize("survived", [0, 1])
def test_a_full_disk_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    path = tmp_path / "file.npz"
    growing = written(path, LARGE, 1, 2)
    before = path.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(growing_npz, "_write", Writes(survived, error))
        growing.append(row(LARGE, 3))
    assert path.read_bytes() == before
    growing.append(row(LARGE, 3))  # there is room again
    assert numbers(path) == [1, 2, 3]


LIMITED = """
import resource, signal, sys
from pathlib import Path
from tests.telemetry.test_growing_npz import LARGE, row, written
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (35_000, 35_000))
growing = written(Path(sys.argv[1]), LARGE, 1, 2, 3)
try:
    growing.append(row(LARGE, 4))
except OSError as error:
    print(error.strerror)
"""


def test_a_limit_of_the_system_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    command = [sys.executable, "-c", LIMITED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    written(tmp_path / "whole.npz", LARGE, 1, 2, 3)
    assert path.read_bytes() == (tmp_path / "whole.npz").read_bytes()


@pytest.mark.parametrize("length", [0, 1, 7, 4096, 100_003])
def test_the_crc_of_two_pieces(length: int) -> None:
    first, second = bytes(range(256)) * 3, os.urandom(length)
    joined = joined_crc32(zlib.crc32(first), zlib.crc32(second), length)
    assert joined == zlib.crc32(first + second)


@pytest.mark.full
def test_the_crc_of_pieces_above_4_gib() -> None:
    zeros, whole, behind = bytes(1 << 24), zlib.crc32(b"first"), 0
    for _ in range(257):
        whole, behind = zlib.crc32(zeros, whole), zlib.crc32(zeros, behind)
    assert joined_crc32(zlib.crc32(b"first"), behind, 257 << 24) == whole


def test_small_rows_are_padded() -> None:
    wide = padded(SMALL, 100)
    assert wide.itemsize == 100 and wide.names == SMALL.names
    assert padded(LARGE, 100) is LARGE
