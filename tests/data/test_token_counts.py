"""The counts of token ids in training samples."""

import torch

from moe_parallel.data.token_counts import token_counts

SAMPLES = [{"tokens": torch.tensor(ids)} for ids in ([0, 1, 1], [1, 3, 0], [2, 2, 2], [1, 0, 3])]


def test_all_samples_are_counted():
    assert token_counts(SAMPLES, vocab_size=5) == [3, 4, 3, 2, 0]


def test_beyond_the_limit_samples_are_left_out_evenly():
    assert token_counts(SAMPLES, vocab_size=5, limit=6) == [1, 2, 3, 0, 0]
