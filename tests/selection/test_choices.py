"""Choices as slots, their counts, and the positions of a rank's tokens."""

import numpy
import torch

from moe_parallel.selection.choices import Choices, slots_of
from moe_parallel.selection.tokens import Tokens


def test_slots_hold_the_chosen_by_falling_gate():
    chosen = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    probs = torch.tensor([[0.2, 9.0, 0.5], [1.0, 2.0, 3.0], [0.3, 0.3, 0.4]])
    experts, slots = slots_of(chosen, probs)
    assert experts.tolist() == [[2, 0, -1], [-1, -1, -1], [2, 0, 1]]
    torch.testing.assert_close(slots[0, :2], torch.tensor([0.5, 0.2]))
    torch.testing.assert_close(slots[2], torch.tensor([0.4, 0.3, 0.3]))


def test_slots_equal_a_loop_over_tokens():
    rng = numpy.random.default_rng(0)
    chosen, probs = rng.random((30, 5)) < 0.4, rng.normal(size=(30, 5))
    experts, slots = slots_of(torch.from_numpy(chosen), torch.from_numpy(probs))
    for t in range(30):
        wanted = sorted((e for e in range(5) if chosen[t, e]), key=lambda e: -probs[t, e])
        assert experts[t].tolist() == wanted + [-1] * (5 - len(wanted))
        assert slots[t, : len(wanted)].tolist() == [probs[t, e] for e in wanted]


def test_negative_probs_do_not_hide_the_chosen():
    experts, _ = slots_of(torch.tensor([[True, True, False]]), torch.tensor([[-5.0, -9.0, 1.0]]))
    assert experts.tolist() == [[0, 1, -1]]


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
