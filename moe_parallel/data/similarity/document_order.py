"""An order of documents in which adjacent documents are similar.

Lory, Appendix C, after Shi et al., "In-Context Pretraining" (2024): start from a document, append
the most similar unused neighbor of the last document, and restart with a new document when all its
neighbors are used.
"""

from dataclasses import dataclass

import numpy as np

# Rows of a memory map that are read at a time.
_ROWS = 4096


@dataclass(frozen=True)
class DocumentOrder:
    """An order that contains every document once.

    Attributes:
        order: int64 [N], numbers of documents.
        restarts: number of restarts with a new document (the first start is not counted).
    """

    order: np.ndarray
    restarts: int


def greedy_order(neighbors_NK: np.ndarray, starts: np.ndarray) -> DocumentOrder:
    """Walk from neighbor to neighbor.

    Args:
        neighbors_NK: int64, the neighbors of each document, most similar first; -1: none.
        starts: int64 [N], every document once: the order in which new starts are tried.
    """
    used = np.zeros(len(starts), dtype=bool)
    order = np.empty(len(starts), dtype=np.int64)
    length = begun = 0
    for start in starts:
        document = -1 if used[start] else int(start)
        begun += document >= 0
        while document >= 0:
            order[length] = document
            used[document] = True
            length += 1
            around = neighbors_NK[document].tolist()
            document = next((other for other in around if other >= 0 and not used[other]), -1)
    assert length == len(starts), (length, len(starts))
    return DocumentOrder(order, max(0, begun - 1))


def lonely_first(neighbors_NK: np.ndarray, seed: int) -> np.ndarray:
    """int64 [N]: documents by how many have them as a neighbor, fewest first; ties at random.

    Shi et al. start with a document of the smallest degree, because it is the most likely to be
    left over. Their degree counts the remaining documents, ours counts all.
    """
    count = len(neighbors_NK)
    named = np.zeros(count, dtype=np.int64)
    for first in range(0, count, _ROWS):
        rows = neighbors_NK[first : first + _ROWS]
        np.add.at(named, rows[rows >= 0], 1)
    shuffled = np.random.default_rng(seed).permutation(count)
    return shuffled[np.argsort(named[shuffled], kind="stable")]


def drop_near_duplicates(
    order: np.ndarray, embeddings_ND: np.ndarray, threshold: float
) -> np.ndarray:
    """Leave out each document whose cosine with the last kept one reaches the threshold.

    Returns:
        int64 [<= N]: the kept documents, in the same order. No two adjacent documents are then
        near duplicates.
    """
    kept: list[int] = []
    last = np.zeros(embeddings_ND.shape[1], dtype=np.float32)
    for first in range(0, len(order), _ROWS):
        chunk = order[first : first + _ROWS]
        for document, vector in zip(chunk.tolist(), embeddings_ND[chunk], strict=True):
            if float(last @ vector) < threshold:
                kept.append(document)
                last = vector
    return np.array(kept, dtype=np.int64)


def adjacent_cosine(order: np.ndarray, embeddings_ND: np.ndarray, pairs: int = 100_000) -> float:
    """The mean cosine of adjacent documents, over at most `pairs` evenly spread pairs.

    NaN for fewer than two documents.
    """
    count = len(order) - 1
    if count < 1:
        return float("nan")
    places = np.unique(np.linspace(0, count - 1, min(count, pairs)).astype(np.int64))
    total = 0.0
    for first in range(0, len(places), _ROWS):
        left = places[first : first + _ROWS]
        a, b = embeddings_ND[order[left]], embeddings_ND[order[left + 1]]
        total += float(np.einsum("nd,nd->", a, b, dtype=np.float64))
    return total / len(places)
