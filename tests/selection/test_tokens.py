"""Choices as slots; the places of a rank's tokens, by hand; random numbers of a place."""

from dataclasses import replace

import numpy
import pytest
import torch

from moe_parallel.selection.choices import Choices, slots_of
from moe_parallel.selection.tokens import Share, Tokens, in_order, part_of, positions, take, zigzag


def test_slots_equal_a_loop_over_tokens():
    rng = numpy.random.default_rng(0)
    chosen, probs = rng.random((30, 5)) < 0.4, rng.normal(size=(30, 5))
    experts, slots = slots_of(torch.from_numpy(chosen), torch.from_numpy(probs))
    for t in range(30):
        wanted = sorted((e for e in range(5) if chosen[t, e]), key=lambda e: -probs[t, e])
        assert experts[t].tolist() == wanted + [-1] * (5 - len(wanted))
        assert slots[t, : len(wanted)].tolist() == [probs[t, e] for e in wanted]


def test_gradients_of_slots_go_to_their_experts_alone():
    probs = torch.rand(4, 3, requires_grad=True)
    chosen = torch.tensor([[True, False, True]] * 4)
    experts, slots = slots_of(chosen, probs)
    slots.masked_fill(experts < 0, 0).sum().backward()
    assert (probs.grad == chosen).all()


def test_sums_by_expert():
    probs = torch.tensor([[0.5, 2.0], [9.0, 1.0]], requires_grad=True)
    choices = Choices(torch.tensor([[0, 2], [-1, 2]]), probs, torch.ones(2, 3), torch.ones(2, 3))
    assert choices.tokens_per_expert().tolist() == [1.0, 0.0, 2.0]
    sums = choices.probs_per_expert()
    assert sums.tolist() == [0.5, 0.0, 3.0]
    sums[2].backward()
    assert probs.grad.tolist() == [[0.0, 1.0], [0.0, 1.0]]


def test_one_rank_has_all_tokens():
    tokens, rows = Tokens(2), torch.rand(6, 3, requires_grad=True)
    assert torch.equal(tokens.of_micro_batch(rows), rows)
    assert not tokens.of_micro_batch(rows).requires_grad
    assert torch.equal(tokens.of_this_rank(rows), rows)
    assert tokens.share(6) == [range(3)]


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


TOKENS = Tokens(2, layer=3, find_place=lambda: (5, 4), seed=1)


class Ends(Tokens):
    """The first and the last of four tokens, as on one of two context-parallel ranks."""

    num_shares = 2

    def share(self, num_tokens: int) -> Share:
        return [range(1), range(3, 4)]


def test_random_numbers_are_those_of_their_place() -> None:
    x_TX = torch.zeros(8, 3)  # four tokens of each sequence
    drawn_SBX = TOKENS.uniform(x_TX).unflatten(0, (4, 2))
    assert torch.equal(TOKENS.uniform(x_TX).unflatten(0, (4, 2)), drawn_SBX)
    assert 0 <= drawn_SBX.min() and drawn_SBX.max() < 1
    assert len(drawn_SBX.unique()) == drawn_SBX.numel()
    # Of a rank with the second sequence alone, and of one with a share of both.
    second = Tokens(1, layer=3, find_place=lambda: (5, 5), seed=1)
    assert torch.equal(second.uniform(x_TX[:4]), drawn_SBX[:, 1])
    ends = Ends(2, layer=3, find_place=lambda: (5, 4), seed=1)
    assert torch.equal(ends.uniform(x_TX[:4]), drawn_SBX[[0, 3]].flatten(0, 1))


def test_no_other_place_has_them() -> None:
    x_TX = torch.zeros(8, 3)
    others = [
        {"layer": 4},
        {"find_place": lambda: (6, 4)},
        {"find_place": lambda: (5, 6)},
        {"seed": 2},
    ]
    drawn = [TOKENS, *(replace(TOKENS, **other) for other in others)]
    numbers = torch.cat([tokens.uniform(x_TX).flatten() for tokens in drawn])
    assert len(numbers.unique()) == len(numbers)
