"""Bits per byte of models that anyone can check, on the same held-out text as ours.

Unigram and trigram models of bytes, trained on the training text, and `xz -9`, which sees only
the held-out text itself. For the two models the code length is -log2 of the probability they give
each byte; for xz it is the size of the file it writes, container included.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np

BYTES = 256

# Bytes looked up at a time: bounds the memory at some hundred megabytes.
_CHUNK = 4 * 2**20


class ByteModel:
    """Bytes given the `order - 1` bytes before them, interpolated as Witten and Bell do.

    For a context h followed N(h) times by a byte, by T(h) different ones, and N(h, c) times by c:

        P(c | h) = (N(h, c) + T(h) P(c | h')) / (N(h) + T(h))

    where h' is h without its oldest byte, and P(c | nothing known) = 1/256 below the empty
    context. A context that never occurred leaves all to h'. So every byte has a probability
    above 0, and they add up to 1. (Method C of Witten and Bell, IEEE Trans. Inf. Theory 37, 1991,
    in the interpolated form of Chen and Goodman, 1998.)

    Attributes:
        order: 1 (unigram), 2 or 3 (trigram).
        shorter: the model of the next lower order, of the same text.
        counts: N(h, c), int64 [contexts, 256]; 128 MiB for a trigram.
    """

    def __init__(self, pieces: Iterable[np.ndarray], order: int) -> None:
        """Count a text, uint8 arrays one after the other, in one pass."""
        assert order in (1, 2, 3), order
        self.order = order
        self.shorter = ByteModel((), order - 1) if order > 1 else None
        self.counts = np.zeros((BYTES ** (order - 1), BYTES), dtype=np.int64)
        self._last = np.zeros(0, dtype=np.uint8)  # bytes before the next piece
        for piece in pieces:
            self._count(piece)

    @cached_property
    def followers(self) -> np.ndarray:
        """T(h), int64 [contexts]."""
        return np.count_nonzero(self.counts, axis=1)

    @cached_property
    def occurrences(self) -> np.ndarray:
        """N(h), int64 [contexts]."""
        return self.counts.sum(axis=1)

    def probabilities(self, data: np.ndarray) -> np.ndarray:
        """float64 [length - order + 1]: of each byte of `data` that has order - 1 before it."""
        return np.concatenate([np.zeros(0), *map(self._probabilities, _codes(data, self.order))])

    def bits(self, data: np.ndarray) -> float:
        """Bits to encode uint8 `data`; its first bytes, without a context, by shorter models."""
        head = 0.0 if self.shorter is None else self.shorter.bits(data[: self.order - 1])
        codes = _codes(data, self.order)
        return head - sum(float(np.log2(self._probabilities(chunk)).sum()) for chunk in codes)

    def _count(self, piece: np.ndarray) -> None:
        assert piece.dtype == np.uint8, piece.dtype
        if self.shorter is not None:
            self.shorter._count(piece)
        data = np.concatenate([self._last, piece])
        counts = self.counts.reshape(-1)
        for codes in _codes(data, self.order):
            counts += np.bincount(codes, minlength=len(counts))
        self._last = data[max(0, len(data) - (self.order - 1)) :].copy()

    def _probabilities(self, codes: np.ndarray) -> np.ndarray:
        """Of n-grams given as numbers to base 256, the predicted byte last."""
        if self.shorter is None:
            shorter = np.full(len(codes), 1 / BYTES)
        else:
            shorter = self.shorter._probabilities(codes % BYTES ** (self.order - 1))
        context, byte = np.divmod(codes, BYTES)
        followers, occurrences = self.followers[context], self.occurrences[context]
        seen = np.maximum(occurrences + followers, 1)
        mixed = (self.counts[context, byte] + followers * shorter) / seen
        return np.where(occurrences > 0, mixed, shorter)


def train_trigram(texts: Iterable[str]) -> ByteModel:
    """A trigram model of texts joined without a separator, as UTF-8.

    Holds some megabytes of the texts at a time. Ten megabytes take about a second.
    """
    return ByteModel(_pieces(texts), order=3)


def held_out_bits_per_byte(trigram: ByteModel, held_out: np.ndarray) -> dict[str, float]:
    """Bits per byte of "unigram", "trigram" and "xz -9" on uint8 [length], as `joined` makes it.

    Raises:
        ValueError: there is no byte.
    """
    if not len(held_out):
        raise ValueError("no held-out text: bits per byte have no meaning")
    assert trigram.shorter is not None and trigram.shorter.shorter is not None
    unigram = trigram.shorter.shorter
    return {
        "unigram": unigram.bits(held_out) / len(held_out),
        "trigram": trigram.bits(held_out) / len(held_out),
        "xz -9": 8 * len(lzma.compress(held_out.tobytes(), preset=9)) / len(held_out),
    }


def joined(texts: Iterable[str]) -> np.ndarray:
    """The UTF-8 of texts without a separator, uint8 [length]."""
    return np.frombuffer(b"".join(text.encode() for text in texts), dtype=np.uint8)


def first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    """The first texts, whole, until they have `limit` bytes of UTF-8; takes no text beyond."""
    read = 0
    for text in texts:
        yield text
        read += len(text.encode())
        if read >= limit:
            return


def _pieces(texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Texts in arrays of about _CHUNK bytes: to count a short one takes as long as a long one."""
    waiting: list[str] = []
    length = 0
    for text in texts:
        waiting.append(text)
        length += len(text)
        if length >= _CHUNK:
            yield joined(waiting)
            waiting, length = [], 0
    yield joined(waiting)


def _codes(data: np.ndarray, order: int) -> Iterator[np.ndarray]:
    """Each run of `order` bytes as a number to base 256, int64, a chunk at a time."""
    for start in range(0, len(data) - order + 1, _CHUNK):
        stop = min(start + _CHUNK, len(data) - order + 1)
        codes = np.zeros(stop - start, dtype=np.int64)
        for i in range(order):
            codes = codes * BYTES + data[start + i : stop + i]
        yield codes
