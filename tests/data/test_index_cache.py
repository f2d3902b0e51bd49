import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_parallel.data.datasets import Datasets
from moe_parallel.data.sealed import file_digest, read_sealed, write_sealed
from tests.data.hostile import Payload
from tests.data.small_text import numbered_datasets


def stream(datasets: Datasets) -> torch.Tensor:
    return torch.stack([datasets.train[i]["labels"] for i in range(30)])


def cache_of(folder: Path) -> Path:
    (found,) = (path for path in (folder / "cache").iterdir() if path.is_dir())
    return found


def seal(cache: Path) -> None:
    """Write a record that agrees with the files, as an attacker would."""
    files = {path.name: file_digest(path) for path in cache.iterdir()}
    del files["complete.json"]
    write_sealed(cache / "complete.json", {"files": files})


@pytest.mark.parametrize("index", ["document_index", "sample_index", "shuffle_index"])
def test_an_edited_index_is_built_again(tmp_path: Path, index: str) -> None:
    first = numbered_datasets(tmp_path)
    assert first.warnings == ()
    expected = stream(first)
    for path in cache_of(tmp_path).glob(f"*{index}.npy"):
        np.save(path, np.load(path)[::-1])
    again = numbered_datasets(tmp_path)
    assert torch.equal(stream(again), expected)
    assert len(again.warnings) == 1 and "damaged" in again.warnings[0]
    assert numbered_datasets(tmp_path).warnings == ()


@pytest.mark.parametrize("index", ["document_index", "sample_index", "shuffle_index"])
def test_a_pickle_in_place_of_an_index_runs_nothing(tmp_path: Path, index: str) -> None:
    expected = stream(numbered_datasets(tmp_path))
    marker = tmp_path / "marker"
    brackets = b"\x93NUMPY\x01\0" + (3000).to_bytes(2, "little") + b"(" * 2999 + b"\n"
    for hostile in (pickle.dumps(Payload(marker)), _object_array(tmp_path, marker), brackets):
        for sealed in (False, True):
            for path in cache_of(tmp_path).glob(f"*{index}.npy"):
                path.write_bytes(hostile)
            if sealed:
                seal(cache_of(tmp_path))
            again = numbered_datasets(tmp_path)
            assert torch.equal(stream(again), expected)
            assert "damaged" in again.warnings[0]
            assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists(), "the payload works"


def _object_array(folder: Path, marker: Path) -> bytes:
    path = folder / "objects.npy"
    np.save(path, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    return path.read_bytes()


@pytest.mark.parametrize("content", ["", "[" * 100_000, "{}", "[]"])
def test_a_damaged_record_is_begun_anew(tmp_path: Path, content: str) -> None:
    expected = stream(numbered_datasets(tmp_path))
    (cache_of(tmp_path) / "complete.json").write_text(content)
    again = numbered_datasets(tmp_path)
    assert torch.equal(stream(again), expected) and again.warnings
    assert set(read_sealed(cache_of(tmp_path) / "complete.json")) == {"files"}


def test_a_damaged_folder_behind_a_link_is_not_taken(tmp_path: Path) -> None:
    expected = stream(numbered_datasets(tmp_path))
    cache = cache_of(tmp_path)
    moved = cache.rename(tmp_path / "moved")
    cache.symlink_to(moved)
    for path in moved.glob("*shuffle_index.npy"):
        np.save(path, np.load(path)[::-1])
    assert torch.equal(stream(numbered_datasets(tmp_path)), expected)
    assert len(list(moved.iterdir())) == len(list(cache.iterdir()))  # no link was followed


def test_a_file_too_many_is_not_taken(tmp_path: Path) -> None:
    expected = stream(numbered_datasets(tmp_path))
    (cache_of(tmp_path) / "more-shuffle_index.npy").write_bytes(b"")
    assert torch.equal(stream(numbered_datasets(tmp_path)), expected)
    assert not list(cache_of(tmp_path).glob("more*"))
