import pickle
from pathlib import Path

import numpy as np
import pytest

from moe_parallel.data.similarity.scratch import Scratch, scratch
from tests.data.hostile import Payload


class Counter:
    """Fills arrays with the number of times it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a: np.ndarray, b: np.ndarray) -> None:
        self.calls += 1
        a[:], b[:] = self.calls, -self.calls


SHAPES = [((2, 3), np.int64), ((4,), np.float32)]


def test_made_once_and_anew_when_anything_differs(tmp_path: Path) -> None:
    work, make = Scratch(tmp_path), Counter()
    a, b = work.arrays("x", ["corpus", 1], SHAPES, make)
    assert (a.tolist(), b.tolist()) == ([[1] * 3] * 2, [-1.0] * 4)
    assert (a.dtype, b.dtype) == (np.int64, np.float32)
    assert work.arrays("x", ["corpus", 1], SHAPES, make)[0][0, 0] == 1
    assert work.arrays("x", ["corpus", 2], SHAPES, make)[0][0, 0] == 2
    assert work.arrays("x", ["corpus", 1], [((2, 4), np.int64), SHAPES[1]], make)[0][0, 0] == 3
    with pytest.raises(ValueError, match="read-only"):
        a[0, 0] = 5


@pytest.mark.parametrize("damage", ["pickle", "objects", "cut", "empty", "other"])
def test_a_damaged_array_is_made_again_and_never_unpickled(tmp_path: Path, damage: str) -> None:
    work, make = Scratch(tmp_path / "work"), Counter()
    (tmp_path / "work").mkdir()
    work.arrays("x", [], SHAPES, make)
    path, _ = sorted(work.folder.iterdir())
    payload = Payload(tmp_path / "marker")
    if damage == "pickle":
        path.write_bytes(pickle.dumps(payload))
    elif damage == "objects":
        np.save(path, np.array([payload], dtype=object), allow_pickle=True)
    elif damage == "other":
        np.save(path, np.zeros((3, 2), dtype=np.int64))
    else:
        path.write_bytes(path.read_bytes()[: 140 if damage == "cut" else 0])
    a, b = work.arrays("x", [], SHAPES, make)
    assert (a[0, 0], b[0], make.calls) == (2, -2, 2)
    assert not (tmp_path / "marker").exists()


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(*arrays: np.ndarray) -> None:
        arrays[0][:] = 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Scratch(tmp_path).arrays("x", [], SHAPES, interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*of: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Scratch(tmp_path).arrays("x", [], SHAPES, Counter())
    assert list(tmp_path.iterdir()) == []


def test_a_named_folder_stays_and_a_temporary_one_goes(tmp_path: Path) -> None:
    with scratch(tmp_path / "kept", beside=tmp_path / "out" / "data") as work:
        (work.folder / "file").touch()
    assert (tmp_path / "kept" / "file").exists()
    with scratch(None, beside=tmp_path / "out" / "data") as work:
        (work.folder / "file").touch()
        assert work.folder.parent == tmp_path / "out"
    assert list((tmp_path / "out").iterdir()) == []
