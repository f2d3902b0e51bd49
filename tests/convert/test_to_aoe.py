"""The tokens to which a conversion is fitted, and how far two layers agree on them."""

import pytest
import torch

from moe_parallel.convert.to_aoe import draw_calibration, share_of_choices
from moe_parallel.errors import InputError
from moe_parallel.selection.choices import Choices


def dataset(samples):
    return [
        {"tokens": torch.full((5,), number), "position_ids": torch.arange(5)}
        for number in range(samples)
    ]


def numbers(batches):
    return [int(tokens[0]) for batch in batches for tokens in batch["tokens"]]


def drawn(samples, seed=0, size=40):
    found = draw_calibration(dataset(size), samples, 4, seed, torch.device("cpu"))
    return numbers(found.fitted), numbers(found.held_out), found.tokens


def test_held_out_samples_are_others():
    fitted, held_out, tokens = drawn(10)
    assert (len(fitted), len(held_out), tokens) == (10, 4, (50, 20))
    assert len(set(fitted + held_out)) == 14
    assert drawn(10) == drawn(10) != drawn(10, seed=1)
    assert len(drawn(30)[0]) == 30  # with 10 held out, this is all the text


@pytest.mark.parametrize("samples", [0, -1, 31])
def test_too_few(samples):
    with pytest.raises(InputError, match="--calibration-samples is"):
        drawn(samples)


def test_the_share_of_choices_by_hand():
    of, by = (
        Choices(torch.tensor(experts), *[torch.zeros(3, 4)] * 3)
        for experts in ([[0, 1], [2, 3], [1, 0]], [[1, 0], [2, 0], [3, 2]])
    )
    assert share_of_choices(of, by) == pytest.approx((2 + 1 + 0) / 6)
    assert share_of_choices(of, of) == 1
