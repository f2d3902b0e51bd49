"""Top-P: the smallest set of experts whose probabilities reach p, compared with a full search."""

import numpy
import pytest
import torch

from moe_parallel.layers.system import system_of
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems import TopPSelection
from moe_parallel.systems.top_p.rule import TopP
from tests.oracles import routing as oracle

TOKENS = Tokens(1)


def _scores(tokens=40, experts=6, scale=1.0):
    return scale * numpy.random.default_rng(0).normal(size=(tokens, experts))


def _chosen(choices: Choices) -> list[list[int]]:
    return [[e for e in row if e >= 0] for row in choices.experts_TK.tolist()]


def _sizes(rule: TopP, scores: torch.Tensor) -> list[int]:
    return (rule(scores, TOKENS).experts_TK >= 0).sum(dim=1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("p", [0.05, 0.4, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_equals_a_search_of_all_sets(p, strict, scale, dtype):
    scores = _scores(scale=scale)
    wanted = oracle.top_p(scores, p, strict=strict)
    choices = TopP(p, strict)(torch.from_numpy(scores).to(dtype), TOKENS)
    assert _chosen(choices) == wanted.experts
    assert choices.experts_TK.shape == scores.shape and choices.experts_TK.dtype == torch.int64
    for row, probs in zip(choices.probs_TK, wanted.probs, strict=True):
        numpy.testing.assert_allclose(row[: len(probs)].numpy(), probs, rtol=1e-5)
    numpy.testing.assert_allclose(choices.probabilities_TE.numpy(), wanted.probabilities, rtol=1e-5)


@pytest.mark.parametrize("n", [3, 5, 7, 8, 10, 16, 48, 64, 256])
def test_equal_probabilities_need_p_n_experts(n):
    zeros = torch.zeros(1, n)
    for count in range(1, n + 1):
        assert _sizes(TopP(count / n), zeros) == [count]
        # Strictly above count / n needs one more expert, if there is one.
        assert _sizes(TopP(count / n, strict=True), zeros) == [min(count + 1, n)]


@pytest.mark.parametrize("strict", [False, True])
def test_the_extremes(strict):
    scores = torch.from_numpy(_scores())
    assert _sizes(TopP(1e-9, strict), scores) == [1] * 40
    assert _sizes(TopP(1.0, strict), scores) == [6] * 40
    certain = torch.tensor([[0.0, 200.0, 0.0]])  # the others underflow to 0
    assert _sizes(TopP(0.99, strict), certain) == [1]


@pytest.mark.parametrize("most", [1, 2, 6])
def test_a_limit_leaves_the_most_probable(most):
    scores = _scores()
    wanted = oracle.top_p(scores, 0.8, most=most)
    choices = TopP(0.8, most=most)(torch.from_numpy(scores), TOKENS)
    assert _chosen(choices) == wanted.experts
    free = TopP(0.8)(torch.from_numpy(scores), TOKENS)
    assert _chosen(choices) == [row[:most] for row in _chosen(free)]
    assert torch.equal(choices.probs_TK, free.probs_TK)  # the remaining probs are not renormalized


def test_p_and_limit_of_evaluations():
    selection = TopPSelection(moe_top_p=0.4, moe_inference_max_experts=2, moe_inference_top_p=0.9)
    training, evaluation = system_of(selection).rules(selection)
    assert training == TopP(0.4, False, None)
    assert evaluation == TopP(0.9, False, 2)
    strict = TopPSelection(moe_top_p=0.3, moe_top_p_strict=True)
    same, also = system_of(strict).rules(strict)
    assert same == also == TopP(0.3, True, None)
