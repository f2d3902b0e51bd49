"""Bits per byte of models that anyone can check, on the same held-out text as ours.

Unigram and trigram models of bytes, trained on the training text, and `xz -9`, which sees only
the held-out text itself. For the two models the code length is -log2 of the probability they give
each byte; for xz it is the size of the file it writes, container included.
"""

import lzma
from collections.abc import Iterable
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
    """

    def __init__(self, data: np.ndarray, order: int) -> None:
        """Count `data`, uint8 [length], in one pass. order: 1 (unigram), 2 or 3 (trigram)."""
        assert data.dtype == np.uint8 and order in (1, 2, 3), (data.dtype, order)
        self.order = order
        self.shorter = ByteModel(data, order - 1) if order > 1 else None
        contexts = BYTES ** (order - 1)
        counts = np.zeros(contexts * BYTES, dtype=np.int32)
        for codes in _codes(data, order):
            counts += np.bincount(codes, minlength=len(counts)).astype(np.int32)
        self.counts = counts.reshape(contexts, BYTES)

    @cached_property
    def followers(self) -> np.ndarray:
        """T(h), int64 [contexts]."""
        return np.count_nonzero(self.counts, axis=1)

    @cached_property
    def occurrences(self) -> np.ndarray:
        """N(h), int64 [contexts]."""
        return self.counts.sum(axis=1, dtype=np.int64)

    def probabilities(self, data: np.ndarray) -> np.ndarray:
        """float64 [length - order + 1]: of each byte of `data` that has order - 1 before it."""
        if len(data) < self.order:
            return np.zeros(0)
        return np.concatenate([self._probabilities(codes) for codes in _codes(data, self.order)])

    def bits(self, data: np.ndarray) -> float:
        """Bits to encode uint8 `data`; its first bytes, without a context, by shorter models."""
        if self.shorter is None:
            return float(-np.log2(self.probabilities(data)).sum())
        head = self.shorter.bits(data[: self.order - 1])
        return head - float(np.log2(self.probabilities(data)).sum())

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


def held_out_baselines(train_texts: Iterable[str], valid_texts: Iterable[str]) -> dict[str, float]:
    """Bits per byte on the validation texts of "unigram", "trigram" and "xz -9".

    Texts are joined without a separator, as UTF-8. Takes about a second for ten megabytes, and
    memory for both texts once.

    Raises:
        ValueError: the validation texts hold no byte.
    """
    train = _joined(train_texts)
    valid = _joined(valid_texts)
    if not len(valid):
        raise ValueError("no validation text: bits per byte have no meaning")
    trigram = ByteModel(train, order=3)
    assert trigram.shorter is not None and trigram.shorter.shorter is not None
    unigram = trigram.shorter.shorter
    return {
        "unigram": unigram.bits(valid) / len(valid),
        "trigram": trigram.bits(valid) / len(valid),
        "xz -9": 8 * len(lzma.compress(valid.tobytes(), preset=9)) / len(valid),
    }


def _joined(texts: Iterable[str]) -> np.ndarray:
    return np.frombuffer(b"".join(text.encode() for text in texts), dtype=np.uint8)


def _codes(data: np.ndarray, order: int) -> Iterable[np.ndarray]:
    """Each run of `order` bytes as a number to base 256, int64, a chunk at a time."""
    for start in range(0, len(data) - order + 1, _CHUNK):
        stop = min(start + _CHUNK, len(data) - order + 1)
        codes = np.zeros(stop - start, dtype=np.int64)
        for i in range(order):
            codes = codes * BYTES + data[start + i : stop + i]
        yield codes
