"""The positions of the tokens of a rank, by hand; taking shares and putting them in order."""

import pytest
import torch

from moe_parallel.selection.tokens import in_order, part_of, positions, take, zigzag


def test_a_rank_has_an_early_and_a_late_chunk() -> None:
    assert [zigzag(12, 3, rank) for rank in range(3)] == [
        [range(2), range(10, 12)],
        [range(2, 4), range(8, 10)],
        [range(4, 8)],  # the chunks of the last rank are neighbors
    ]
    assert zigzag(7, 1, 0) == [range(7)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_sees_as_many_keys_with_a_causal_mask(ranks: int) -> None:
    keys = [int((positions(zigzag(48, ranks, rank)) + 1).sum()) for rank in range(ranks)]
    assert len(set(keys)) == 1 and sum(keys) == 48 * 49 // 2


def test_parts_of_a_share_may_cross_its_chunks() -> None:
    share = zigzag(12, 2, 0)
    assert share == [range(3), range(9, 12)]
    assert [part_of(share, 2, part) for part in range(2)] == [[range(3)], [range(9, 12)]]
    assert [part_of(share, 3, part) for part in range(3)] == [
        [range(2)],
        [range(2, 3), range(9, 10)],
        [range(10, 12)],
    ]
    assert part_of(share, 1, 0) == share


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (3, 4)])
def test_all_shares_in_order_are_the_sequence(ranks: int, parts: int) -> None:
    x_BS = torch.arange(2 * 24).view(2, 24)
    shares = [
        part_of(zigzag(24, ranks, rank), parts, part)
        for rank in range(ranks)
        for part in range(parts)
    ]
    mine = [take(x_BS, share, axis=1) for share in shares]
    assert all(
        part.equal(x_BS[:, positions(share)]) for part, share in zip(mine, shares, strict=True)
    )
    assert in_order(torch.cat(mine, 1), shares, axis=1).equal(x_BS)
