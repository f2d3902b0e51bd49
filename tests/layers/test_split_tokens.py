"""Ranks that share a micro-batch hold parts of its sequences, and gather all of it."""

import torch
from torch import distributed as dist

from moe_parallel.layers.dispatched import SplitTokens
from tests.distributed import run_distributed


def _share():
    """Two sequences of eight tokens on two context-parallel ranks."""
    tokens = SplitTokens(2, dist.group.WORLD, cp_size=2)
    whole = torch.tensor([[b, s] for s in range(8) for b in range(2)])
    mine = tokens.of_this_rank(whole)
    assert torch.equal(tokens.of_micro_batch(mine), whole)
    assert (tokens.num_shares, tokens.num_stretches) == (2, 1)
    return mine[::2, 1].tolist(), tokens.share(len(mine))


def test_context_parallel_ranks_hold_two_chunks():
    assert run_distributed(2, _share) == [
        ([0, 1, 6, 7], [range(2), range(6, 8)]),
        ([2, 3, 4, 5], [range(2, 6)]),
    ]


def _stretch():
    """Two sequences of four tokens, two of each on this rank: rows are (sequence, position)."""
    tokens = SplitTokens(2, dist.group.WORLD)
    whole = torch.tensor([[b, s] for s in range(4) for b in range(2)], dtype=torch.float32)
    mine = tokens.of_this_rank(whole)
    together = tokens.of_micro_batch(mine)
    return mine.tolist(), torch.equal(together, whole), tokens.share(len(mine))


def test_ranks_hold_stretches_of_the_same_sequences():
    (first, whole_0, begin_0), (second, whole_1, begin_1) = run_distributed(2, _stretch)
    assert first == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert second == [[0, 2], [1, 2], [0, 3], [1, 3]]
    assert whole_0 and whole_1
    assert (begin_0, begin_1) == ([range(2)], [range(2, 4)])
