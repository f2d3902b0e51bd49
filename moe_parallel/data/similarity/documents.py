"""An indexed dataset as a list of documents, each available with and without its last token."""

from collections.abc import Iterator

import numpy as np

from moe_parallel.data.indexed import check_indexed, type_of_ids
from moe_parallel.data.manifest import read_manifest
from moe_parallel.errors import InputError

# Every id in an indexed dataset that Megatron wrote is below this.
_ANY_VOCABULARY = 2**31

# Tokens that are processed at a time.
_SPAN_TOKENS = 2**20


class Documents:
    """The documents of PREFIX.bin, read from the disk when they are requested.

    A document is what Megatron's GPTDataset shuffles: one sequence of the index. Each ends with
    the token `eod`. A document that lacks it in the file gets it here, so that two adjacent
    documents stay separate.

    Attributes:
        eod: id of the token that ends a document.
        lengths: int64 [N], tokens of each document, `eod` included.
        tokens: the sum of the lengths.
        tokenizer: fingerprint of the tokenizer that wrote them; None: unknown.
        sources: the files of text that they came from; None: unknown.
        largest_id: the largest id in the file, or `eod`.
    """

    def __init__(self, prefix: str, eod: int | None = None) -> None:
        """Open the dataset.

        Args:
            prefix: path without .bin and .idx.
            eod: the id; None: the last token of every document, if it is the same in all.

        Raises:
            InputError: files as in check_indexed; documents that end differently, without `eod`.
        """
        lengths = check_indexed(prefix, _ANY_VOCABULARY).astype(np.int64)
        manifest = read_manifest(prefix)
        self.tokenizer = None if manifest is None else manifest.tokenizer
        self.sources = None if manifest is None else manifest.sources
        self._ids = np.memmap(f"{prefix}.bin", mode="r", dtype=type_of_ids(prefix))
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        last = self._ids[self._ends[lengths > 0] - 1]
        self.eod = _common(last, prefix) if eod is None else eod
        ended = np.zeros(len(lengths), dtype=bool)
        ended[lengths > 0] = last == self.eod
        self._body_ends = self._ends - ended
        self.lengths = self._body_ends - self._starts + 1
        self.tokens = int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        """int64 [lengths[i]]: the ids of document i, ended by `eod`."""
        return np.append(self.body(i).astype(np.int64), self.eod)

    def body(self, i: int) -> np.ndarray:
        """The ids of document i without the `eod` at its end, in the file's own integer type."""
        return self._ids[self._starts[i] : self._body_ends[i]]

    @property
    def largest_id(self) -> int:
        pieces = range(0, len(self._ids), _SPAN_TOKENS)
        return max(self.eod, *(int(self._ids[i : i + _SPAN_TOKENS].max()) for i in pieces))

    def spans(self, most: int) -> Iterator[range]:
        """Ranges of documents in order: at most `most`, of a million tokens (or one longer)."""
        first = 0
        while first < len(self):
            reach = np.searchsorted(self._ends, self._starts[first] + _SPAN_TOKENS, side="right")
            last = min(max(int(reach), first + 1), first + most)
            yield range(first, last)
            first = last


def _common(last: np.ndarray, prefix: str) -> int:
    ids = np.unique(last)
    if len(ids) != 1:
        raise InputError(
            f"--data-path {prefix}: its documents end with {len(ids)} different tokens, so the "
            "end-of-document token is unknown; give it with --eod-id"
        )
    return int(ids[0])
