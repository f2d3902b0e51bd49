"""Batches are compared with sample numbers: sample i of this dataset contains only i."""

import itertools
from functools import partial

import pytest
import torch

from moe_parallel.data.sampler import batches, evaluation_batches, evaluation_sizes, sample_count

SEQUENCE = 3


class Numbered:
    """`count` samples; all fields of sample i contain i, and its loss mask contains ones."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        assert 0 <= i < self.count
        number = torch.full((SEQUENCE,), i)
        ones = torch.ones(SEQUENCE)
        fields = {"tokens": number, "labels": number + 1, "position_ids": number}
        return {**fields, "loss_mask": ones, "dataset_id": torch.tensor(0)}


def dealt(count: int, consumed: int, micro: int, ranks: int) -> list[list[list[int]]]:
    """The samples of each micro-batch by [rank][round]."""
    dealing = partial(batches, consumed_samples=consumed, micro_batch_size=micro)
    found = []
    for rank in range(ranks):
        mine = list(dealing(Numbered(count), data_parallel_rank=rank, data_parallel_size=ranks))
        for batch in mine:
            assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
            assert torch.equal(batch["labels"], batch["tokens"] + 1)
        found.append([batch["tokens"][:, 0].tolist() for batch in mine])
    return found


def test_micro_batches_are_dealt_to_the_ranks_in_turn() -> None:
    assert dealt(14, 2, 2, 3) == [[[2, 3], [8, 9]], [[4, 5], [10, 11]], [[6, 7], [12, 13]]]
    assert dealt(11, 0, 2, 3) == [[[0, 1]], [[2, 3]], [[4, 5]]]  # no round begins incomplete
    assert dealt(5, 0, 2, 3) == [[], [], []]


LAYOUTS = list(itertools.product((1, 2, 3, 4), (1, 2, 4)))


@pytest.mark.parametrize(("micro", "ranks"), LAYOUTS)
@pytest.mark.parametrize("consumed", [0, 24, 31])
def test_a_global_batch_is_the_same_under_every_layout(
    micro: int, ranks: int, consumed: int
) -> None:
    """Because of this property training can continue in another layout."""
    global_batch = 48  # a multiple of micro x ranks for every layout
    by_rank = dealt(consumed + 3 * global_batch, consumed, micro, ranks)
    rounds_in_a_step = global_batch // (micro * ranks)
    for step in range(3):
        mine = range(step * rounds_in_a_step, (step + 1) * rounds_in_a_step)
        seen = [by_rank[rank][turn] for turn in mine for rank in range(ranks)]
        first = consumed + step * global_batch
        assert list(itertools.chain(*seen)) == list(range(first, first + global_batch))


@pytest.mark.parametrize(("micro", "ranks"), LAYOUTS)
@pytest.mark.parametrize("samples", [None, 1, 7, 100])
def test_evaluation_sees_each_sample_once_in_equally_many_steps(
    micro: int, ranks: int, samples: int | None
) -> None:
    dataset = Numbered(13)
    sizes = evaluation_sizes(sample_count(dataset, samples), micro, ranks)
    seen = []
    for rank in range(ranks):
        place = {"data_parallel_rank": rank, "data_parallel_size": ranks}
        mine = list(evaluation_batches(dataset, samples=samples, sizes=sizes, **place))
        assert [batch["tokens"].shape for batch in mine] == [(size, SEQUENCE) for size in sizes]
        for batch in mine:
            # Routing is counted by micro-batches: none mixes samples with padding.
            assert len(batch["loss_mask"].unique()) == 1
            seen += batch["tokens"][batch["loss_mask"][:, 0] > 0, 0].tolist()
    assert sorted(seen) == list(range(min(13, samples or 13)))
    assert max(sizes) <= micro and (len(sizes) - 2) * micro * ranks < len(seen)
