"""Complete words and ranks of items, by hand."""

import numpy as np

from moe_parallel.analysis.routing.vocabulary import Vocabulary

PIECES = ["the", " the", "re", ".", " tr", "ee", " 7", "\n", ""]
THE, SPACE_THE, RE, DOT, TR, EE, SEVEN, LINE, EMPTY = range(len(PIECES))


def words(tokens, samples=None):
    """The tokens that are complete words."""
    vocabulary = Vocabulary(PIECES)
    samples = [0] * len(tokens) if samples is None else samples
    found = vocabulary._complete(np.array(tokens), np.array(samples))
    return found.tolist()


def test_complete_words():
    assert words([THE, SPACE_THE, DOT]) == [True, True, False]
    assert words([THE, RE, DOT]) == [False, False, False]  # there
    assert words([SPACE_THE, RE]) == [False, False]
    assert words([TR, EE, SPACE_THE]) == [False, False, True]  # tree the
    assert words([TR, SPACE_THE]) == [True, True]
    assert words([SEVEN, DOT]) == [False, False]  # no letters
    assert words([LINE, THE, LINE]) == [False, True, False]
    assert words([DOT, RE, EMPTY, EE]) == [False, True, False, True]
    assert words([]) == []


def test_the_ends_of_a_sequence_end_words():
    assert words([THE, RE], [0, 1]) == [True, True]
    assert words([TR, EE], [0, 1]) == [True, True]


def test_ranks():
    vocabulary = Vocabulary(["a", "b", "c", "d"])
    tokens = np.array([0, 1, 1, 2, 2, 2])
    vocabulary.add(tokens, np.arange(6), np.array([9.0, 1, 3, 2, 2, 2]))
    assert vocabulary.ranked(2).tolist() == [1, 2]  # equal means: by item
    assert vocabulary.ranked(1).tolist() == [0, 1, 2]
    assert vocabulary.ranked(4).tolist() == []
