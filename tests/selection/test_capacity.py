"""The choices that a full expert drops, compared with experts that accept one choice at a time."""

import numpy
import pytest
import torch

from moe_parallel.selection.capacity import DROP_ORDERS, Capacity
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from tests.oracles import layers as oracle

POLICIES = ["probs", "position"]


def keep(choices: Choices, factor: float, policy: str) -> Choices:
    k = choices.experts_TK.shape[1]
    return Capacity(factor, DROP_ORDERS[policy], pad=False, k=k).keep(choices, Tokens(1))


def choices_of(experts, probs=None, num_experts=4) -> Choices:
    experts_TK = torch.tensor(experts)
    probs_TK = torch.full(experts_TK.shape, 0.5) if probs is None else torch.tensor(probs)
    scores_TE = torch.zeros(len(experts), num_experts)
    return Choices(experts_TK, probs_TK, scores_TE, scores_TE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("factor", [0.01, 0.3, 0.5, 1.0, 1.25, 4.0])
@pytest.mark.parametrize("tokens, num_experts, k", [(1, 1, 1), (16, 4, 2), (33, 5, 3), (40, 8, 8)])
@pytest.mark.parametrize("levels", [3, 1000])  # few levels of probs: many ties
def test_equals_filling_up_one_by_one(policy, factor, tokens, num_experts, k, levels):
    rng = numpy.random.default_rng(tokens + levels)
    scores = rng.normal(size=(tokens, num_experts)) + numpy.linspace(0, 2, num_experts)
    routing = oracle.route(scores, k)
    routing.probs = (rng.integers(1, levels + 1, size=(tokens, k)) / levels).tolist()
    # Some slots are empty from the start.
    empty = rng.random((tokens, k)) < 0.2
    routing.experts = [
        [None if empty[t, j] else expert for j, expert in enumerate(row)]
        for t, row in enumerate(routing.experts)
    ]
    given = [[-1 if expert is None else expert for expert in row] for row in routing.experts]

    limit = oracle.capacity(tokens, k, num_experts, factor)
    wanted = oracle.drop(routing, limit, policy).experts
    kept = keep(choices_of(given, routing.probs, num_experts), factor, policy)
    assert kept.experts_TK.tolist() == [[-1 if e is None else e for e in row] for row in wanted]
    numpy.testing.assert_allclose(kept.probs_TK.numpy(), routing.probs, rtol=1e-6)
    assert kept.tokens_per_expert().max() <= limit


@pytest.mark.parametrize(
    "tokens, k, num_experts, factor, rows",
    [
        (8, 2, 4, 1.0, 4),
        (8, 2, 4, 1.25, 5),
        (8, 2, 4, 1.01, 5),
        (7, 2, 4, 1.0, 4),
        (1, 1, 8, 1.0, 1),
        (16, 1, 8, 0.5, 1),
        (0, 2, 4, 1.0, 0),
        (200, 2, 8, 1.1, 55),  # 50 * 1.1 is more than 55 in floating point
        (100, 2, 8, 1.12, 28),
    ],
)
def test_capacity(tokens, k, num_experts, factor, rows):
    capacity = Capacity(factor, DROP_ORDERS["probs"], pad=True, k=k)
    assert capacity.rows_per_expert(tokens, num_experts) == rows


def test_first_choices_go_ahead_of_second_choices():
    # Two rows per expert. Expert 1: second choice of tokens 0 and 1, first of tokens 2 and 3.
    choices = choices_of([[0, 1], [0, 1], [1, 2], [1, 3]])
    assert keep(choices, 1.0, "position").experts_TK.tolist() == [[0, -1], [0, -1], [1, 2], [1, 3]]
    assert keep(choices, 1.0, "probs").experts_TK.tolist() == [[0, 1], [0, 1], [-1, 2], [-1, 3]]


@pytest.mark.parametrize("policy", POLICIES)
def test_other_probs_and_their_gradients_stay(policy):
    probs = torch.rand(8, 2, requires_grad=True)
    choices = Choices(torch.tensor([[0, 1]] * 8), probs, *[torch.zeros(8, 4)] * 2)
    assert keep(choices, 0.5, policy).probs_TK is probs
