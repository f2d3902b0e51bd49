"""Similarity batching as loops over all pairs, in numpy fp64, independent of the package."""

import math
from typing import Any

import numpy

Array = Any  # numpy arrays of any shape


def tf_idf_cosines(documents: list[list[int]]) -> Array:
    """[N, N]: cosines of (1 + ln count) * ln((1 + N) / df) over tokens."""
    table = numpy.zeros((len(documents), 1 + max(map(max, documents))))
    for token in range(table.shape[1]):
        holding = sum(token in ids for ids in documents)
        for i, ids in enumerate(documents):
            if token in ids:
                weight = 1 + math.log(ids.count(token))
                table[i, token] = weight * math.log((1 + len(documents)) / holding)
    return cosines(table)


def cosines(vectors: Array) -> Array:
    """Cosines of all pairs, [N, N]; 0 where a vector is 0."""
    n = len(vectors)
    out = numpy.zeros((n, n))
    for i in range(n):
        for j in range(n):
            length = numpy.linalg.norm(vectors[i]) * numpy.linalg.norm(vectors[j])
            out[i, j] = numpy.dot(vectors[i], vectors[j]) / length if length else 0
    return out


def neighbors(similarity: Array, k: int) -> list[list[int]]:
    """The k other documents with the largest positive similarity to each, largest first."""
    out = []
    for i, row in enumerate(similarity):
        others = [j for j in range(len(row)) if j != i and row[j] > 0]
        out.append(sorted(others, key=lambda j: (-row[j], j))[:k])
    return out


def greedy_order(similarity: Array, k: int, starts: list[int]) -> tuple[list[int], int]:
    """Order and restarts: each step goes to the most similar unused one of the k neighbors."""
    around = neighbors(similarity, k)
    left = set(range(len(similarity)))
    order = [starts[0]]
    left.remove(starts[0])
    restarts = 0
    while left:
        here = order[-1]
        candidates = [j for j in around[here] if j in left]
        if candidates:
            following = max(candidates, key=lambda j: (similarity[here, j], -j))
        else:
            following = next(j for j in starts if j in left)
            restarts += 1
        order.append(following)
        left.remove(following)
    return order, restarts


def without_near_duplicates(similarity: Array, order: list[int], threshold: float) -> list[int]:
    kept: list[int] = []
    for document in order:
        if not kept or similarity[kept[-1], document] < threshold:
            kept.append(document)
    return kept
