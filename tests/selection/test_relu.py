"""ReLU: every expert with a positive score, with that score."""

import torch

from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems.relu.rule import ReLU

TOKENS = Tokens(1)


def test_positive_scores_choose_and_weigh():
    scores_TE = torch.tensor([[0.5, -1.0, 2.0, 0.0], [-1.0, -2.0, 0.0, -0.5], [1.0, 1.0, 1.0, 3.0]])
    choices = ReLU()(scores_TE, TOKENS)
    assert choices.experts_TK.tolist() == [[2, 0, -1, -1], [-1] * 4, [3, 0, 1, 2]]
    assert choices.probs_TK.tolist() == [[2.0, 0.5, 0, 0], [0.0] * 4, [3.0, 1, 1, 1]]
    assert choices.tokens_per_expert().tolist() == [2, 1, 2, 1]


def test_an_expert_enters_with_a_prob_of_zero():
    """The sum of probs * outputs is continuous where a score passes 0."""
    outputs_E = torch.tensor([3.0, -5.0])
    for score in (-1e-7, 0.0, 1e-7):
        choices = ReLU()(torch.tensor([[0.5, score]]), TOKENS)
        (experts_K,), (probs_K,) = choices.experts_TK, choices.probs_TK
        total = (outputs_E[experts_K] * probs_K * (experts_K >= 0)).sum()
        assert abs(total - 1.5) < 1e-6


def test_only_positive_scores_have_a_gradient():
    scores_TE = torch.tensor([[0.5, -1.0, 2.0, 0.0]], requires_grad=True)
    ReLU()(scores_TE, TOKENS).probs_per_expert().sum().backward()
    assert scores_TE.grad.tolist() == [[1, 0, 1, 0]]


def test_a_given_expert_whose_score_is_not_positive_has_the_prob_0():
    """A replay may name it; with its score it would subtract its output."""
    scores_TE = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    choices = ReLU().of(scores_TE, torch.tensor([[1, 2, 3, -1]]))
    assert choices.experts_TK.tolist() == [[1, 2, 3, -1]]
    assert choices.probs_TK[0, :3].tolist() == [0.0, 2.0, 0.0]
