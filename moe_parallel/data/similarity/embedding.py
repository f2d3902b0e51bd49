"""Documents into vectors whose inner products are their cosines."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from moe_parallel.data.progress import Advance
from moe_parallel.data.similarity.documents import Documents


class Embedder(ABC):
    """Turns documents into vectors.

    Attributes:
        size: D, the width of its vectors.
        batch: the most documents that it embeds at a time.
        passes: how often it reads the corpus.
        description: everything that its vectors depend on besides the documents.
    """

    size: int
    batch: int
    passes: int
    description: str

    def fit(self, documents: Documents, advance: Advance) -> None:
        """Compute from the corpus what embedding one document needs; by default nothing."""
        return None

    @abstractmethod
    def embed(self, bodies: Sequence[np.ndarray]) -> np.ndarray:
        """float32 [len(bodies), D], each of length at most 1, of documents without their eod."""


def embed_all(
    documents: Documents, embedder: Embedder, out_ND: np.ndarray, advance: Advance
) -> None:
    """Fit, then write each document's vector to its row; `advance` receives tokens, each pass."""
    embedder.fit(documents, advance)
    for span in documents.spans(embedder.batch):
        out_ND[span.start : span.stop] = embedder.embed([documents.body(i) for i in span])
        advance(int(documents.lengths[span.start : span.stop].sum()))


def normalized(rows: np.ndarray) -> np.ndarray:
    """float32, each row divided by its length; zero rows stay zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1), dtype=np.float32)
