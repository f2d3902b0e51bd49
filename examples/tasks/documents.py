"""The documents of copy.yaml and word_sums.yaml. They are made here, so no network is needed."""

import random

from datasets import Dataset, DatasetDict

WORDS = "zero one two three four five six seven eight nine".split()


def copies(**_):
    """Two words to say again."""
    choose = random.Random(0)
    return _splits({"words": " ".join(choose.choices(WORDS, k=2))} for _ in range(120))


def sums(**_):
    """Sums of two words, below ten."""
    pairs = [(a, b) for a in range(10) for b in range(10 - a)]
    random.Random(0).shuffle(pairs)
    return _splits({"a": WORDS[a], "b": WORDS[b], "sum": WORDS[a + b]} for a, b in pairs)


def _splits(documents):
    """Five examples for prompts; the others are the test."""
    documents = list(documents)
    return DatasetDict(
        train=Dataset.from_list(documents[:5]), test=Dataset.from_list(documents[5:])
    )
