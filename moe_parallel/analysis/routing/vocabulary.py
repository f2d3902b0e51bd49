"""The items of a vocabulary: how often each occurs, with how many experts, and whether as a word.

Huang et al. 2024, section 5.2 and Table 4, list the items with the most and the fewest experts, and
count the complete words among them by hand. Here an occurrence is a complete word if it consists of
letters, after at most one space, and the text goes on after it without a letter or digit and came
to it without one.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Vocabulary:
    """Counts of the items. `pieces_V`: the text of each item by itself."""

    def __init__(self, pieces_V: Sequence[str]) -> None:
        self.pieces_V = pieces_V
        size = len(pieces_V)
        self.tokens_V = np.zeros(size, dtype=np.int64)
        self.words_V = np.zeros(size, dtype=np.int64)  # occurrences as a complete word
        self.experts_V = np.zeros(size)  # summed over occurrences, mean over layers
        self._spaced_V = np.array([piece[:1].isspace() for piece in pieces_V], dtype=bool)
        self._letters_V = np.array([_without_space(p).isalpha() for p in pieces_V], dtype=bool)
        self._begins_V = np.array([piece[:1].isalnum() for piece in pieces_V], dtype=bool)
        self._ends_V = np.array([piece[-1:].isalnum() for piece in pieces_V], dtype=bool)

    def add(self, token_T: np.ndarray, sample_T: np.ndarray, experts_T: np.ndarray) -> None:
        """Add tokens in the order of their text. `experts_T`: of each token, mean over layers."""
        size = len(self.pieces_V)
        self.tokens_V += np.bincount(token_T, minlength=size)
        self.words_V += np.bincount(token_T[self._complete(token_T, sample_T)], minlength=size)
        self.experts_V += np.bincount(token_T, weights=experts_T, minlength=size)

    def _complete(self, token_T: np.ndarray, sample_T: np.ndarray) -> np.ndarray:
        """bool [T]. The ends of a sequence count as ends of words."""
        if not len(token_T):
            return np.zeros(0, dtype=bool)
        joined_T = np.append(False, sample_T[1:] == sample_T[:-1])  # to the token before
        after_letter_T = joined_T & np.append(False, self._ends_V[token_T[:-1]])
        begins_T = self._spaced_V[token_T] | ~after_letter_T
        before_letter_T = np.append(joined_T[1:] & self._begins_V[token_T[1:]], False)
        return self._letters_V[token_T] & begins_T & ~before_letter_T

    def ranked(self, at_least: int) -> np.ndarray:
        """The items that occur at least `at_least` times, most experts first."""
        items = np.flatnonzero(self.tokens_V >= max(1, at_least))
        means = self.experts_V[items] / self.tokens_V[items]
        return items[np.lexsort((items, -means))]


def _without_space(piece: str) -> str:
    return piece[1:] if piece[:1] == " " else piece
