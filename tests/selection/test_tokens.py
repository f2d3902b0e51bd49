"""What rules may ask of their tokens."""

from dataclasses import replace

import torch

from moe_parallel.selection.tokens import Share, Tokens

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
