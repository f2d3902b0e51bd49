"""Batches in turns. tests/tools/test_analyze.py compares the layouts."""

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from moe_parallel.evaluation.selections_of_ranks import batches_of_rank


@dataclass(frozen=True)
class Place:
    """A rank of a group, without the group."""

    number: int
    of: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.of


def _group(number: int, of: int) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, Place(number, of))


def test_ranks_take_turns_and_read_as_many() -> None:
    batches = [
        {"tokens": torch.full((3, 2), number), "loss_mask": torch.ones(3, 2)} for number in range(5)
    ]

    def read(rank: int, ranks: int) -> list[tuple[int, int, bool]]:
        """(first sequence, batch, whether it counts) of each pass."""
        return [
            (first, int(batch["tokens"][0, 0]), bool(batch["loss_mask"].all()))
            for first, batch in batches_of_rank(iter(batches), _group(rank, ranks))
        ]

    assert read(0, 1) == [(3 * number, number, True) for number in range(5)]
    assert read(0, 2) == [(0, 0, True), (6, 2, True), (12, 4, True)]
    assert read(1, 2) == [(3, 1, True), (9, 3, True), (12, 4, False)]
    assert read(5, 8) == [(12, 4, False)]
