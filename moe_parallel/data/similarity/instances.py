"""Ordered documents, cut into training instances of one length.

GPTDataset shuffles documents, joins them, and cuts the result. Sample i is tokens
[i*S, i*S + S + 1); its last token is only a label, and is the first token of sample i + 1. So

- documents of S + 1 tokens, input and label of one sample, would drift: each sample would start
  one token earlier in its document than the previous one, and most samples would span two;
- documents of m*S tokens fit: in any shuffled order, every sample is one instance. The label of
  an instance's last token is its true successor, except in the last instance of a document, where
  it is the first token of the next document: one wrong label in m*S.

Within an epoch GPTDataset also shuffles samples, so the m instances of a document are separated.
"""

from collections.abc import Iterator

import numpy as np

from moe_parallel.data.similarity.documents import Documents
from moe_parallel.errors import InputError


class Instances:
    """Pieces of the joined documents, each of `per_piece` instances of `seq_length` tokens.

    The last piece may have fewer instances. Tokens that do not fill an instance are left out.

    Attributes:
        count: number of instances.
        left_out: number of tokens at the end that fill no instance.
    """

    def __init__(
        self, documents: Documents, order: np.ndarray, seq_length: int, per_piece: int
    ) -> None:
        """
        Args:
            documents: the documents with the text.
            order: int64, the documents to use, in order.
            seq_length: S, tokens per instance; training must use the same value.
            per_piece: m, instances per piece.

        Raises:
            InputError: the text is shorter than one instance.
        """
        self._documents = documents
        self._order = order
        self._ends = np.cumsum(documents.lengths[order])
        self._piece = seq_length * per_piece
        tokens = int(self._ends[-1])
        self.count, self.left_out = divmod(tokens, seq_length)
        self._tokens = tokens - self.left_out
        if not self.count:
            raise InputError(
                f"--seq-length {seq_length} is longer than the text: the documents that are kept "
                f"have {tokens} tokens; use a shorter sequence or more text"
            )

    def __len__(self) -> int:
        return (self._tokens + self._piece - 1) // self._piece

    def __getitem__(self, piece: int) -> np.ndarray:
        """int64 [m*S]: a piece of the text."""
        start = piece * self._piece
        end = min(start + self._piece, self._tokens)
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        ids = np.concatenate([self._documents[i] for i in self._order[first : last + 1].tolist()])
        skipped = start - (int(self._ends[first - 1]) if first else 0)
        return ids[skipped : skipped + end - start]

    def shuffled(self, seed: int) -> Iterator[np.ndarray]:
        """Every piece once, in random order."""
        for piece in np.random.default_rng(seed).permutation(len(self)).tolist():
            yield self[piece]
