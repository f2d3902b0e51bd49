"""RoutingOverlap of choices, worked by hand."""

import pytest
import torch

from moe_parallel.convert.to_aoe import routing_overlap
from moe_parallel.selection.choices import Choices


def choices(experts, probs):
    scores = torch.zeros(len(experts), 4)
    return Choices(torch.tensor(experts), torch.tensor(probs), scores, scores)


def test_by_hand():
    of = choices([[0, 1], [2, 3], [1, 0]], [[0.75, 0.25], [0.5, 0.5], [0.6, 0.4]])
    by = choices([[1, 0], [2, 0], [3, 2]], [[0.5, 0.5], [0.75, 0.25], [0.9, 0.1]])
    found = routing_overlap(of, by)
    assert found.choices == pytest.approx((2 + 1 + 0) / 6)
    assert found.all_choices == pytest.approx(1 / 3)
    assert found.first_choice == pytest.approx(1 / 3)
    assert found.probs == pytest.approx((0.25 + 0.5 + 1.0) / 3)


def test_with_itself():
    of = choices([[0, 1], [2, 3]], [[0.75, 0.25], [0.5, 0.5]])
    found = routing_overlap(of, of)
    assert (found.choices, found.all_choices, found.first_choice, found.probs) == (1, 1, 1, 0)
