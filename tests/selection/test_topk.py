"""Top-K of scores with every kind of probs, bias and group limit, compared with an oracle."""

import math

import numpy
import pytest
import torch

from moe_parallel.selection import rules
from moe_parallel.selection.choices import greatest
from moe_parallel.selection.rules import GroupLimit
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from tests.oracles import layers as oracle

SHAPES = [(1, 1, 1), (9, 4, 2), (9, 5, 5), (30, 7, 3), (0, 4, 2)]  # T, E, K
TOKENS = Tokens(1)


def _scores(tokens, experts):
    return numpy.random.default_rng(0).normal(size=(tokens, experts)).astype("float32")


@pytest.mark.parametrize("tokens, experts, k", [shape for shape in SHAPES if shape[2] > 1])
def test_probs_are_a_softmax_over_the_selected(tokens, experts, k):
    scores = _scores(tokens, experts)
    wanted = oracle.route(scores, k)
    choices = TopK(k)(torch.from_numpy(scores), TOKENS)
    assert choices.experts_TK.tolist() == wanted.experts
    assert choices.experts_TK.dtype == torch.int64
    numpy.testing.assert_allclose(
        choices.probs_TK.numpy(), numpy.reshape(wanted.probs, (tokens, k)), rtol=1e-6
    )
    again = TopK(k).of(torch.from_numpy(scores), choices.experts_TK)
    numpy.testing.assert_array_equal(again.probs_TK.numpy(), choices.probs_TK.numpy())


def test_probs_of_all_experts_are_the_softmax_over_all():
    scores = torch.from_numpy(_scores(9, 5))
    for gate in (rules.softmax_of_selected, rules.raw_probability):
        choices = TopK(5, gate)(scores, TOKENS)
        by_expert = torch.zeros(9, 5).scatter(1, choices.experts_TK, choices.probs_TK)
        torch.testing.assert_close(by_expert, torch.softmax(scores, dim=1))


@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_sigmoids_far_from_0_still_have_shares(offset):
    scores = torch.tensor([[0.0, 1.0, 2.0]]) + offset
    rule = TopK(2, rules.sigmoid_share_of_selected, rules.sigmoid_shares, torch.sigmoid)
    choices = rule.of(scores, torch.tensor([[2, 1]]))
    # Far below 0 a sigmoid is an exponential; far above it is 1.
    weights = numpy.exp([0.0, 1.0, 2.0]) if offset < 0 else numpy.ones(3)
    numpy.testing.assert_allclose(choices.probabilities_TE[0], weights / weights.sum(), rtol=1e-5)
    probs = weights[[2, 1]] / weights[[2, 1]].sum()
    numpy.testing.assert_allclose(choices.probs_TK[0], probs, rtol=1e-5)


def test_a_bias_selects_and_never_weighs():
    scores = torch.tensor([[2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 1.0])  # on probabilities of .67, .24 and .09
    choices = TopK(2, ranking=rules.softmax, bias_E=bias)(scores, TOKENS)
    assert choices.experts_TK.tolist() == [[2, 0]]
    torch.testing.assert_close(choices.probs_TK, torch.softmax(torch.tensor([[0.0, 2.0]]), 1))
    torch.testing.assert_close(choices.probabilities_TE, torch.softmax(scores, 1))


@pytest.mark.parametrize("k, groups, allowed", [(2, 4, 2), (3, 2, 1), (4, 4, 4), (4, 2, 2)])
def test_groups_equal_a_search_over_them(k, groups, allowed):
    scores = _scores(200, 8)
    choices = TopK(k, groups=GroupLimit(groups, allowed))(torch.from_numpy(scores), TOKENS)
    members = numpy.arange(8).reshape(groups, -1)
    for t, row in enumerate(scores):
        value = [sum(sorted(row[m])[::-1][: max(1, k // allowed)]) for m in members]
        best = sorted(range(groups), key=lambda g: -value[g])[:allowed]
        open_to_it = [e for g in best for e in members[g]]
        wanted = sorted(open_to_it, key=lambda e: -row[e])[:k]
        assert choices.experts_TK[t].tolist() == wanted


SATURATED = [
    [18.0, 20.0, 22.0, 25.0],
    [11.999, 11.9999, 10.0, 12.0],
    [50.0, 40.0, 60.0, 45.0],
    [-120.0, -118.0, -121.0, -119.0],
    [0.0, -200.0, -120.0, -150.0],
    [7.0, 3.0, 7.0, 7.0],  # the lowest index wins
]


@pytest.mark.parametrize("ranking", [torch.sigmoid, rules.softmax])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias_E": torch.zeros(4)}, {"bias_E": torch.ones(4)}, {"groups": GroupLimit(4, 2)}],
    ids=["plain", "no bias yet", "equal bias", "groups"],
)
def test_where_a_ranking_saturates_the_logits_decide(ranking, options):
    choices = TopK(2, ranking=ranking, **options)(torch.tensor(SATURATED), TOKENS)
    wanted = [sorted(range(4), key=lambda e, row=row: (-row[e], e))[:2] for row in SATURATED]
    assert choices.experts_TK.tolist() == wanted


def test_a_bias_decides_between_saturated_sigmoids():
    bias = torch.tensor([0.0, 1e-3, 0.0, 1e-3])
    choices = TopK(3, ranking=torch.sigmoid, bias_E=bias)(torch.tensor(SATURATED[:1]), TOKENS)
    assert choices.experts_TK.tolist() == [[3, 1, 2]]


@pytest.mark.parametrize("experts", [4, 16, 128])
def test_the_lowest_index_wins_a_tie_and_nan_is_the_largest(experts):
    special = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 1.0, -1.0, 1e-45, -1e-45]
    drawn = torch.randint(len(special), (60, experts), generator=torch.Generator().manual_seed(0))
    values = torch.tensor(special)[drawn]
    wanted = torch.argsort(values, dim=1, descending=True, stable=True)[:, :4]
    assert torch.equal(greatest(values, 4), wanted)
    assert torch.equal(greatest(values.double(), 4), wanted)
    assert greatest(torch.zeros(3, experts), 4).tolist() == [[0, 1, 2, 3]] * 3
    ties = torch.where(values.isnan(), values, torch.tensor(special)[2:][drawn.flip(0) % 9])
    order = torch.argsort(ties, dim=1, descending=True, stable=True)
    by_value = torch.argsort(values.gather(1, order), dim=1, descending=True, stable=True)
    assert torch.equal(greatest(values, 4, ties), order.gather(1, by_value)[:, :4])


def test_probs_that_underflow_beside_a_zero_expert_are_0() -> None:
    probs = rules.WithoutZeroExperts(rules.softmax_of_selected, num_free=1, num_zero=1)
    scores_TE = torch.tensor([[0.0, 1.0, 200.0]], requires_grad=True)
    probs_TK = probs(scores_TE, torch.softmax(scores_TE, dim=1), torch.tensor([[2, 1]]))
    assert probs_TK.tolist() == [[0, 0]]
    probs_TK.sum().backward()
    assert torch.isfinite(scores_TE.grad).all()
