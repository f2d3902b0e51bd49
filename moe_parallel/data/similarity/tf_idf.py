"""TF-IDF of hashed n-grams of token ids, projected to a dense vector, without trained weights.

For a document d, an n-gram g of 1 to `orders` tokens, and N documents, df(g) of which contain g:

    weight(d, g) = (1 + ln count(d, g)) * ln((1 + N) / df(g))

The second factor is never 0 for an n-gram that occurs, so equal documents have cosine 1 even if
all documents are equal. An n-gram that occurs everywhere has only a weight of about 1/N. N-grams
are counted by a hash in `buckets` places. A sparse random projection (Kane and Nelson, "Sparser
Johnson-Lindenstrauss Transforms", 2014) then adds each weight, with a random sign, to `_COPIES` of
`size` numbers. It preserves inner products up to about 1/sqrt(size).

An n-gram that only one document contains adds nothing to any inner product with another document.
Yet most n-grams of two or more tokens are such, and would cause most of the projection's error. So
they count in a document's length but are not projected: vectors are shorter than 1 by the part that
only they contain, and the inner product of two documents is their cosine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_parallel.data.progress import Advance
from moe_parallel.data.similarity.documents import Documents
from moe_parallel.data.similarity.embedding import Embedder, normalized

_COPIES = 8


@dataclass(frozen=True)
class SparseRows:
    """The non-zero entries of a matrix [documents, buckets], by row, then by column."""

    rows: np.ndarray  # int64 [M]
    columns: np.ndarray  # int64 [M]
    values: np.ndarray  # int64 counts or float64 weights [M]

    def only(self, chosen: np.ndarray) -> "SparseRows":
        """The entries where `chosen` (bool [M]) holds."""
        return SparseRows(self.rows[chosen], self.columns[chosen], self.values[chosen])

    def lengths(self, count: int) -> np.ndarray:
        """float64 [count]: Euclidean length of each row."""
        return np.sqrt(np.bincount(self.rows, weights=self.values**2, minlength=count))


class HashedTfIdf(Embedder):
    """Vectors of `size` numbers from TF-IDF over n-grams."""

    batch = 4096
    passes = 2

    def __init__(self, size: int, orders: int = 1, seed: int = 0, buckets: int = 2**20) -> None:
        """
        Args:
            size: D, width of the vectors.
            orders: longest n-gram, in tokens.
            seed: of the projection.
            buckets: number of places to which n-grams are hashed, a power of two.
        """
        assert buckets & (buckets - 1) == 0, buckets
        self.size = size
        self.orders = orders
        self.seed = seed
        self.buckets = buckets
        self.description = f"tf-idf size={size} orders={orders} seed={seed} buckets={buckets}"
        self._idf = np.zeros(buckets)
        self._shared = np.zeros(buckets, dtype=bool)

    def fit(self, documents: Documents, advance: Advance) -> None:
        """Count the documents that contain each n-gram."""
        holding = np.zeros(self.buckets, dtype=np.int64)
        for span in documents.spans(self.batch):
            counts = self._counts([documents.body(i) for i in span])
            holding += np.bincount(counts.columns, minlength=self.buckets)
            advance(int(documents.lengths[span.start : span.stop].sum()))
        self._idf = np.log((1 + len(documents)) / np.maximum(holding, 1))
        self._shared = holding > 1

    def weights(self, bodies: Sequence[np.ndarray]) -> SparseRows:
        """TF-IDF before the projection."""
        counts = self._counts(bodies)
        values = (1 + np.log(counts.values)) * self._idf[counts.columns]
        return SparseRows(counts.rows, counts.columns, values)

    def embed(self, bodies: Sequence[np.ndarray]) -> np.ndarray:
        every = self.weights(bodies)
        shared = every.only(self._shared[every.columns])
        share = shared.lengths(len(bodies)) / np.maximum(every.lengths(len(bodies)), 1e-30)
        return normalized(self._project(shared, len(bodies))) * share[:, None].astype(np.float32)

    def _project(self, entries: SparseRows, count: int) -> np.ndarray:
        """float64 [count, D]."""
        dense = np.zeros(count * self.size)
        for copy in range(_COPIES):
            # A different hash of the column for each copy; its top bit is the sign.
            salt = _mix(np.array([self.seed * _COPIES + copy]))
            hashed = _mix(entries.columns.astype(np.uint64) ^ salt)
            places = entries.rows * self.size + (hashed % np.uint64(self.size)).astype(np.int64)
            signs = np.where(hashed >> np.uint64(63), -1.0, 1.0)
            dense += np.bincount(places, weights=entries.values * signs, minlength=len(dense))
        return dense.reshape(count, self.size)

    def _counts(self, bodies: Sequence[np.ndarray]) -> SparseRows:
        rows, grams = _ngrams(bodies, self.orders)
        keys = rows * self.buckets + (grams & np.uint64(self.buckets - 1)).astype(np.int64)
        found, counts = np.unique(keys, return_counts=True)
        return SparseRows(found // self.buckets, found % self.buckets, counts)


def _ngrams(bodies: Sequence[np.ndarray], orders: int) -> tuple[np.ndarray, np.ndarray]:
    """The document (int64) and the hash (uint64) of every n-gram, none across two documents."""
    row = np.repeat(np.arange(len(bodies)), [len(body) for body in bodies])
    ids = np.concatenate([np.zeros(0, np.uint64), *(body.astype(np.uint64) for body in bodies)])
    grams = _mix(ids + np.uint64(1))
    rows_of, grams_of = [row], [grams]
    for n in range(1, orders):
        # Hash the hash of n tokens with the next id: a sum of two hashes would ignore the order.
        grams = _mix(grams[:-1] + ids[n:])
        inside = row[:-n] == row[n:]
        rows_of.append(row[:-n][inside])
        grams_of.append(grams[inside])
    return np.concatenate(rows_of), np.concatenate(grams_of)


def _mix(x: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood's SplitMix64: a bijection of uint64 whose bits look independent."""
    x = x.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
