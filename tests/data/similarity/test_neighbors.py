import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_parallel.data.similarity.neighbors import (
    BuildIndex,
    ExactIndex,
    InvertedIndex,
    faiss,
    find_neighbors,
    found_share,
    mean_neighbors,
)
from moe_parallel.errors import InputError
from tests.oracles import similarity as oracle


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def clustered(clusters: int, each: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centers = np.repeat(rng.normal(size=(clusters, width)), each, axis=0)
    return unit(centers + 0.7 * rng.normal(size=centers.shape))


def find(
    vectors: np.ndarray, k: int, build: BuildIndex | None = None, shard: int = 10**6
) -> tuple[np.ndarray, np.ndarray]:
    neighbors = np.full((len(vectors), k), -7, dtype=np.int64)
    cosines = np.full((len(vectors), k), -7, dtype=np.float32)
    find_neighbors(
        vectors,
        build or ExactIndex(),
        shard=shard,
        neighbors_NK=neighbors,
        cosines_NK=cosines,
        advance=lambda queries: None,
    )
    return neighbors, cosines


def test_against_all_pairs() -> None:
    vectors = clustered(10, 12, 16)
    similarity = oracle.cosines(vectors)
    neighbors, cosines = find(vectors, 5)
    assert neighbors.tolist() == oracle.neighbors(similarity, 5)
    assert cosines == pytest.approx(np.take_along_axis(similarity, neighbors, axis=1), abs=1e-5)


@pytest.mark.parametrize("shard", [7, 100, 1500])
def test_bounded_memory_changes_nothing(tmp_path: Path, shard: int) -> None:
    vectors = clustered(40, 30, 24)
    on_disk = np.memmap(tmp_path / "vectors", np.float32, "w+", shape=vectors.shape)
    on_disk[:] = vectors
    whole, whole_cosines = find(vectors, 10)
    parts, parts_cosines = find(on_disk, 10, shard=shard)
    assert np.array_equal(whole, parts)
    assert whole_cosines == pytest.approx(parts_cosines, abs=1e-6)


def test_more_copies_than_neighbors_never_find_themselves() -> None:
    vectors = unit(np.ones((9, 4)))
    for shard in (9, 4):
        neighbors, cosines = find(vectors, 3, shard=shard)
        assert not (neighbors == np.arange(9)[:, None]).any()
        assert (neighbors >= 0).all()
        assert cosines == pytest.approx(1)
        assert all(len(set(row)) == 3 for row in neighbors.tolist())


def test_fewer_documents_than_neighbors() -> None:
    vectors = unit(np.array([[1.0, 0], [1, 1], [1, 2]]))
    neighbors, cosines = find(vectors, 4, shard=2)
    assert neighbors.tolist() == [[1, 2, -1, -1], [2, 0, -1, -1], [1, 0, -1, -1]]
    assert (cosines[:, 2:] == 0).all()
    assert mean_neighbors(neighbors) == 2


def test_what_shares_nothing_is_no_neighbor() -> None:
    vectors = np.array([[1, 0], [0, 1], [-1, 0], [0, 0], [1, 0]], dtype=np.float32)
    neighbors, _ = find(vectors, 2)
    assert neighbors.tolist() == [[4, -1], [-1, -1], [-1, -1], [-1, -1], [0, -1]]


@pytest.mark.parametrize("shard", [10**6, 1300])
def test_inverted_lists_find_nearly_all(shard: int) -> None:
    vectors = clustered(60, 50, 32)
    exact, _ = find(vectors, 10)
    found, _ = find(vectors, 10, InvertedIndex(probes=8, seed=0), shard)
    hits = [len(set(a) & set(b)) for a, b in zip(exact.tolist(), found.tolist(), strict=True)]
    recall = sum(hits) / exact.size
    assert recall > 0.9  # measured: 0.9987 to 1.0 over three seeds
    few, cosines = find(vectors, 10, InvertedIndex(probes=1, seed=0), shard)
    assert not np.array_equal(few, exact)  # the approximate index was used
    hits = [len(set(a) & set(b)) for a, b in zip(exact.tolist(), few.tolist(), strict=True)]
    whole = len(vectors)
    share = found_share(vectors, few, cosines, seed=0, sample=whole)
    assert share == pytest.approx(sum(hits) / exact.size, abs=0.001)
    assert found_share(vectors, few, cosines, seed=0) == pytest.approx(share, abs=0.1)


def test_all_that_there_is_counts_as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_parallel.data.similarity.neighbors._ROWS", 7)
    vectors = np.concatenate([unit(np.ones((9, 4))), np.zeros((2, 4), np.float32)])
    neighbors, cosines = find(vectors, 3)  # any three of eight copies are correct
    assert found_share(vectors, neighbors, cosines, seed=0) == 1
    neighbors[:, 2] = -1
    assert found_share(vectors, neighbors, cosines, seed=0) == pytest.approx(2 / 3)


def test_inverted_lists_of_a_few_documents() -> None:
    vectors = clustered(2, 3, 8)
    assert np.array_equal(find(vectors, 2)[0], find(vectors, 2, InvertedIndex(4, 0))[0])


def test_without_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"needs faiss.*: pip install faiss-cpu$"):
        faiss()


def test_a_broken_faiss_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'swig'", name="swig")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="swig"):
        faiss()
