"""Whether experts prefer texts: mutual information, with a permutation test.

I(expert; text) is that of a choice drawn at random, in nats. All texts are equally likely; within a
text the probability of an expert is its share of the choices (of merged experts, its weight). It is
0 if all texts use the experts alike, and at most ln of the number of texts. With few tokens it is
above 0 by chance. The test says by how much: it gives the texts' labels to other sequences, as many
to each text as before, and computes the same number again.

Tokens of a sequence are alike, so labels are permuted over blocks of whole sequences. The number of
blocks is bounded: when there are too many, neighbors of one text are joined in pairs.

Shape suffixes: N blocks, A texts, G layers, E experts, X = G * E.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_BLOCKS = 2048
FEWEST_BLOCKS = 64
MOST_BYTES = 64 * 2**20


class Blocks:
    """Choices of each expert in runs of consecutive sequences of one text."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        size = 8 * num_layers * num_experts
        self._most = max(FEWEST_BLOCKS, min(MOST_BLOCKS, MOST_BYTES // size))
        self._shape = (num_layers, num_experts)
        self.sequences = 1  # of a block; the last of a text may have fewer
        self._counts: dict[str, list[np.ndarray]] = {}
        self._last: dict[str, int] = {}  # the block of the last sequence of each text

    def add(self, text: str, sample: int, counts_GE: np.ndarray) -> None:
        """Add (a part of) the sequence with the number `sample`; numbers of a text ascend."""
        counts = self._counts.setdefault(text, [])
        block = sample // self.sequences
        if counts and self._last[text] == block:
            counts[-1] += counts_GE
            return
        counts.append(counts_GE.astype(np.float64))
        self._last[text] = block
        if sum(map(len, self._counts.values())) > self._most:
            self._join()

    def _join(self) -> None:
        self.sequences *= 2
        for text, counts in self._counts.items():
            pairs = [counts[place : place + 2] for place in range(0, len(counts), 2)]
            self._counts[text] = [sum(pair[1:], pair[0]) for pair in pairs]
            self._last[text] //= 2

    def arrays(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """(texts, label of each block [N], counts [N, G, E])."""
        texts = list(self._counts)
        labels_N = np.repeat(np.arange(len(texts)), [len(self._counts[text]) for text in texts])
        counts = [each for text in texts for each in self._counts[text]]
        return texts, labels_N, np.array(counts).reshape(-1, *self._shape)


@dataclass(frozen=True)
class Specialization:
    """The result of the test for one layer, or for the mean over layers (`layer` is None)."""

    layer: int | None
    mutual_information: float  # nats
    by_chance: float  # mean over permutations
    p: float  # share of permutations, the actual labels included, with at least as much


def mutual_information(counts_AGE: np.ndarray) -> np.ndarray:
    """I(expert; text) of each layer, in nats: [..., G] from counts [..., A, G, E]."""
    totals = counts_AGE.sum(axis=-1, keepdims=True)
    of_text = counts_AGE / np.where(totals > 0, totals, 1)
    mean = of_text.mean(axis=-3, keepdims=True)
    ratio = np.divide(of_text, mean, where=of_text > 0, out=np.ones_like(of_text))
    return np.asarray((of_text * np.log(ratio)).sum(axis=-1).mean(axis=-2))


def specialization(
    blocks: Blocks, layers: Sequence[int], permutations: int, seed: int
) -> list[Specialization]:
    """The test of each layer, and of the mean over layers at the end; [] for a single text.

    Args:
        layers: the numbers of the layers.
        permutations: the p value is at least 1 / (permutations + 1).
    """
    texts, labels_N, counts_NGE = blocks.arrays()
    if len(texts) < 2:
        return []
    flat_NX = counts_NGE.reshape(len(counts_NGE), -1)

    def measured(labels: np.ndarray) -> np.ndarray:
        members_AN = labels[None] == np.arange(len(texts))[:, None]
        counts_AX = members_AN.astype(np.float64) @ flat_NX
        values_G = mutual_information(counts_AX.reshape(len(texts), *counts_NGE.shape[1:]))
        return np.append(values_G, values_G.mean())

    actual = measured(labels_N)
    generator = np.random.default_rng(seed)
    total, reached = np.zeros_like(actual), np.ones_like(actual)
    for _ in range(permutations):
        values = measured(generator.permutation(labels_N))
        total += values
        # Values that differ only by rounding count as equal.
        reached += values >= actual * (1 - 1e-12)
    return [
        Specialization(layer, float(value), float(mean), float(p))
        for layer, value, mean, p in zip(
            [*layers, None], actual, total / permutations, reached / (permutations + 1), strict=True
        )
    ]
