"""The k nearest neighbors of every document by cosine, with FAISS and bounded memory.

An index contains at most `shard` documents. It is filled with one shard of the corpus after
another, all documents are looked up in each, and the best k so far are stored on the disk. With
exact indices the result does not depend on the shard, except for cosines equal to the last bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_parallel.data.progress import Advance
from moe_parallel.optional import import_optional

BuildIndex = Callable[[np.ndarray], Any]  # float32 [M, D] -> an index of its rows

# FAISS's k-means needs at least 39 vectors per centroid, and warns below that.
_SAMPLE_PER_CELL = 64

# Documents looked up at a time. Ctrl-C may wait as long as one such look-up.
_QUERIES = 1024

# Vectors read at a time when a few queries are compared with all documents.
_ROWS = 65536

# The most by which float32 cosines differ if they are computed in another order.
_ROUNDING = 1e-5


def faiss() -> Any:
    """The FAISS library.

    Raises:
        InputError: it is not installed.
    """
    return import_optional("faiss", "the search for similar documents")


@dataclass(frozen=True)
class ExactIndex:
    """Compares every pair: time grows with the square of the corpus."""

    def __call__(self, vectors_MD: np.ndarray) -> Any:
        index = faiss().IndexFlatIP(vectors_MD.shape[1])
        index.add(vectors_MD)
        return index


@dataclass(frozen=True)
class InvertedIndex:
    """Inverted lists: k-means divides the shard into cells, and a query searches a few of them.

    Attributes:
        probes: number of cells that a query searches.
        seed: of the k-means and of its training sample.
    """

    probes: int
    seed: int

    def __call__(self, vectors_MD: np.ndarray) -> Any:
        library = faiss()
        count, width = vectors_MD.shape
        cells = max(1, min(round(4 * math.sqrt(count)), count // _SAMPLE_PER_CELL))
        centers = library.IndexFlatIP(width)
        index = library.IndexIVFFlat(centers, width, cells, library.METRIC_INNER_PRODUCT)
        index.cp.spherical = True
        index.cp.seed = self.seed
        index.cp.min_points_per_centroid = 1  # else it warns about a corpus of a few documents
        sample = np.random.default_rng(self.seed).choice(
            count, size=min(count, cells * _SAMPLE_PER_CELL), replace=False
        )
        index.train(vectors_MD[np.sort(sample)])
        index.add(vectors_MD)
        index.nprobe = self.probes
        return index


def find_neighbors(
    embeddings_ND: np.ndarray,
    build: BuildIndex,
    *,
    shard: int,
    neighbors_NK: np.ndarray,
    cosines_NK: np.ndarray,
    advance: Advance,
) -> None:
    """Find the K documents most similar to each, most similar first, without the document itself.

    Only documents of positive cosine are neighbors: others have nothing in common.

    Args:
        embeddings_ND: float32, with cosines as inner products; may be a memory map.
        build: creates the index of a shard.
        shard: the most documents in an index.
        neighbors_NK: int64, output: numbers of documents, -1 if there are fewer than K.
        cosines_NK: float32, output: their cosines, 0 if there is no neighbor.
        advance: receives numbers of queries; N per shard.
    """
    count, k = neighbors_NK.shape
    for start in range(0, count, shard):
        index = build(np.ascontiguousarray(embeddings_ND[start : start + shard]))
        for first in range(0, count, _QUERIES):
            chunk = slice(first, min(first + _QUERIES, count))
            queries_QD = np.ascontiguousarray(embeddings_ND[chunk])
            # One more than K, because a document finds itself.
            cosines, found = index.search(queries_QD, k + 1)
            found = np.where(found >= 0, found + start, -1)
            found[found == np.arange(chunk.start, chunk.stop)[:, None]] = -1
            if start:
                found = np.concatenate([neighbors_NK[chunk], found], axis=1)
                cosines = np.concatenate([cosines_NK[chunk], cosines], axis=1)
            neighbors_NK[chunk], cosines_NK[chunk] = _best(found, cosines, k)
            advance(len(queries_QD))


def mean_neighbors(neighbors_NK: np.ndarray) -> float:
    """The average number of neighbors per document."""
    count = len(neighbors_NK)
    chunks = (neighbors_NK[first : first + _QUERIES] for first in range(0, count, _QUERIES))
    return sum(int((chunk >= 0).sum()) for chunk in chunks) / count


def found_share(
    embeddings_ND: np.ndarray,
    neighbors_NK: np.ndarray,
    cosines_NK: np.ndarray,
    *,
    seed: int,
    sample: int = 100,
) -> float:
    """The share of the true K nearest that was found, for `sample` documents compared with all.

    A document as similar as the true K-th counts as found, because equal ones are interchangeable.
    """
    count, k = neighbors_NK.shape
    asked = np.sort(np.random.default_rng(seed).permutation(count)[:sample])
    queries_QD = embeddings_ND[asked]
    true = np.full((len(asked), k), -1, dtype=np.int64)
    nearest = np.zeros((len(asked), k), dtype=np.float32)
    for start in range(0, count, _ROWS):
        cosines = queries_QD @ embeddings_ND[start : start + _ROWS].T
        others = np.broadcast_to(np.arange(start, start + cosines.shape[1]), cosines.shape)
        others = np.where(others == asked[:, None], -1, others)
        both = np.concatenate([true, others], axis=1)
        true, nearest = _best(both, np.concatenate([nearest, cosines], axis=1), k)
    least = np.where(true >= 0, nearest, np.inf).min(axis=1, keepdims=True)
    found = (neighbors_NK[asked] >= 0) & (cosines_NK[asked] >= least - _ROUNDING)
    return float(found.sum() / max(1, (true >= 0).sum()))


def _best(found: np.ndarray, cosines: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k per row with the largest positive cosines; of equal ones, the lower number first."""
    usable = (found >= 0) & (cosines > 0)
    cosines = np.where(usable, cosines, 0)
    found = np.where(usable, found, -1)
    order = np.lexsort((found, -cosines), axis=1)[:, :k]
    return np.take_along_axis(found, order, axis=1), np.take_along_axis(cosines, order, axis=1)
