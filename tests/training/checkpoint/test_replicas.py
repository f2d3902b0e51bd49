"""Which rank's copies of a tensor are wrong, from tables of checksums."""

import torch

from moe_parallel.training.checkpoint.digest import _astray, astray
from tests.distributed import run_distributed

A, B, C = -7, 3, 2**40  # ids of tensors
PADDING = 0


def _found(ids: list[list[int]], sums: list[list[int]]) -> dict[int, dict[int, int]]:
    return _astray(torch.tensor(ids), torch.tensor(sums))


def test_equal_copies_and_padding() -> None:
    assert _found([[A, B], [A, PADDING], [B, A]], [[5, -6], [5, 0], [-6, 5]]) == {}


def test_the_most_copies_are_right() -> None:
    assert _found([[A], [A], [A]], [[1], [2], [2]]) == {A: {0: 1}}
    assert _found([[A]] * 5, [[9], [1], [2], [2], [3]]) == {A: {0: 2, 1: 2, 4: 2}}


def test_of_two_the_lower_rank_counts_as_right() -> None:
    assert _found([[A, B], [C, B]], [[1, 2], [1, 3]]) == {B: {1: 0}}
    assert _found([[A]] * 4, [[1], [2], [2], [1]]) == {A: {1: 0, 2: 0}}


def _line(rank_sums: list[dict[str, int]]) -> str | None:
    mine = rank_sums[torch.distributed.get_rank()]
    return astray(list(mine), torch.tensor(list(mine.values())))


def test_the_rank_with_the_most_differences_is_named() -> None:
    """Ranks with other numbers of tensors, in another order."""
    sums = [{"a": 1, "b": 2, "c": 3}, {"b": 2, "d": 0, "c": 4, "a": 0}]
    lines = run_distributed(2, _line, sums)
    assert lines[0] == lines[1]
    assert " differs from rank 0 in " in lines[0] and " and 1 more, which should be" in lines[0]
    assert lines[0].startswith("rank 1 on ")
