"""How often each token id occurs in the training text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

#: Samples are left out evenly if there are more tokens than this, because frequencies need no more.
LIMIT = 1 << 22


def token_counts(samples: Any, vocab_size: int, limit: int = LIMIT) -> list[int]:
    """The number of times that each id occurs in at most about `limit` tokens of the samples.

    Args:
        samples: a sequence of dicts of tensors, all of one length; `tokens` has the ids.
        vocab_size: the number of ids.
    """
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    tokens = len(samples) * len(samples[0]["tokens"])
    for number in range(0, len(samples), math.ceil(tokens / limit)):
        counts_V += np.bincount(samples[number]["tokens"].numpy(), minlength=vocab_size)
    return counts_V.tolist()
