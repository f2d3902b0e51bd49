"""Bits per byte of simple baselines on the same held-out text as the model.

The baselines are a unigram and a trigram model of bytes, trained on the training text, and `xz -9`,
which sees only the held-out text. The code length of the two models is -log2 of the probability
that they give each byte. The code length of xz is the size of its file, container included.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np

BYTES = 256

# Bytes looked up at a time. This limits the memory to a few hundred megabytes.
_CHUNK = 4 * 2**20


class ByteModel:
    """Predicts a byte from the `order - 1` bytes before it, with Witten-Bell interpolation.

    N(h) is the number of bytes that follow a context h, T(h) the number of different ones, and
    N(h, c) the number of times that c follows h:

        P(c | h) = (N(h, c) + T(h) P(c | h')) / (N(h) + T(h))

    where h' is h without its oldest byte, and below the empty context P(c) = 1/256. For a context
    that never occurred, P(c | h) = P(c | h'). So every byte has a probability above 0, and the
    probabilities sum to 1. (Method C of Witten and Bell, IEEE Trans. Inf. Theory 37, 1991, in the
    interpolated form of Chen and Goodman, 1998.)

    Attributes:
        order: 1 (unigram), 2 or 3 (trigram).
        shorter: the model of the next lower order, trained on the same text.
        counts: N(h, c), int64 [contexts, 256]; 128 MiB for a trigram.
    """

    def __init__(self, text: np.ndarray, order: int) -> None:
        """Count the bytes of a text, uint8 [length]."""
        assert order in (1, 2, 3) and text.dtype == np.uint8, (order, text.dtype)
        self.order = order
        self.shorter = ByteModel(text, order - 1) if order > 1 else None
        self.counts = np.zeros((BYTES ** (order - 1), BYTES), dtype=np.int64)
        counts = self.counts.reshape(-1)
        for codes in _codes(text, order):
            counts += np.bincount(codes, minlength=len(counts))

    @cached_property
    def followers(self) -> np.ndarray:
        """T(h), int64 [contexts]."""
        return np.count_nonzero(self.counts, axis=1)

    @cached_property
    def occurrences(self) -> np.ndarray:
        """N(h), int64 [contexts]."""
        return self.counts.sum(axis=1)

    def probabilities(self, data: np.ndarray) -> np.ndarray:
        """The probability of each byte of `data` from the order-th on: float64 [length-order+1]."""
        return np.concatenate([np.zeros(0), *map(self._probabilities, _codes(data, self.order))])

    def bits(self, data: np.ndarray) -> float:
        """Bits that encode uint8 `data`. The models of lower order encode the first bytes, which
        have too little context."""
        head = 0.0 if self.shorter is None else self.shorter.bits(data[: self.order - 1])
        codes = _codes(data, self.order)
        return head - sum(float(np.log2(self._probabilities(chunk)).sum()) for chunk in codes)

    def _probabilities(self, codes: np.ndarray) -> np.ndarray:
        """The probabilities of n-grams given as base-256 numbers; the predicted byte is last."""
        if self.shorter is None:
            shorter = np.full(len(codes), 1 / BYTES)
        else:
            shorter = self.shorter._probabilities(codes % BYTES ** (self.order - 1))
        context, byte = np.divmod(codes, BYTES)
        followers, occurrences = self.followers[context], self.occurrences[context]
        seen = np.maximum(occurrences + followers, 1)
        mixed = (self.counts[context, byte] + followers * shorter) / seen
        return np.where(occurrences > 0, mixed, shorter)


def held_out_bits_per_byte(trigram: ByteModel, held_out: np.ndarray) -> dict[str, float]:
    """Bits per byte of "unigram", "trigram" and "xz -9" on uint8 [length], the result of `joined`.

    Raises:
        ValueError: the text has no byte.
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
    """The UTF-8 of texts, joined without a separator: uint8 [length]."""
    return np.frombuffer(b"".join(text.encode() for text in texts), dtype=np.uint8)


def first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    """The first texts, each complete, until they have `limit` bytes of UTF-8. Reads no further."""
    read = 0
    for text in texts:
        yield text
        read += len(text.encode())
        if read >= limit:
            return


def _codes(data: np.ndarray, order: int) -> Iterator[np.ndarray]:
    """Each run of `order` bytes as a base-256 number, int64, one chunk at a time."""
    for start in range(0, len(data) - order + 1, _CHUNK):
        stop = min(start + _CHUNK, len(data) - order + 1)
        codes = np.zeros(stop - start, dtype=np.int64)
        for i in range(order):
            codes = codes * BYTES + data[start + i : stop + i]
        yield codes
