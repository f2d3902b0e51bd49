"""Rules by a threshold: above an expert's cutoff (Threshold), above 0 (ReLU)."""

import pytest
import torch

from moe_parallel.selection import rules
from moe_parallel.selection.rules import Gate
from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems.relu.rule import ReLU
from moe_parallel.systems.threshold.rule import Threshold

TOKENS = Tokens(1)


def experts_of(rule: Threshold, *scores: list[float]) -> list[list[int]]:
    """The experts of each token."""
    experts_TK = rule(torch.tensor(scores), TOKENS).experts_TK
    return [[expert for expert in row if expert >= 0] for row in experts_TK.tolist()]


def test_by_hand() -> None:
    """Cutoffs 1 and 2: a token has two experts, one or none."""
    rule = Threshold(rules.sigmoid, bias_E=torch.tensor([-1.0, -2.0]))
    choices = rule(torch.tensor([[3.0, 4.0], [1.5, 1.0], [0.0, 1.9]]), TOKENS)
    assert choices.experts_TK.tolist() == [[1, 0], [0, -1], [-1, -1]]  # the largest prob first
    assert choices.tokens_per_expert().tolist() == [2.0, 1.0]
    expected = torch.sigmoid(torch.tensor([4.0, 3.0])).tolist()
    assert choices.probs_TK[0].tolist() == pytest.approx(expected)


def test_a_score_at_the_cutoff_is_not_above_it() -> None:
    """Scores that all tie choose nobody: no tie is broken by the number of an expert."""
    assert experts_of(Threshold(rules.sigmoid), [0.0, 0.0]) == [[]]
    rule = Threshold(rules.softmax_of_scores).with_bias(torch.full((3,), -0.1))
    assert experts_of(rule, [0.1, 0.1, 0.1], [0.1, 0.2, 0.0]) == [[], [1]]


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (rules.sigmoid, [0.8808, 0.7311]),
        (rules.softmax_of_scores, [0.7311, 0.2689]),
        (rules.sigmoid_of_value, [0.7311, 0.6225]),
        (rules.raw_value, [1.0, 0.5]),
        (rules.softmax_of_chosen, [0.6225, 0.3775]),
    ],
)
def test_gates_by_hand(gate: Gate, expected: list[float]) -> None:
    """Scores 2 and 1, cutoffs 1 and 0.5: values 1 and 0.5. Only the last gate is of the chosen."""
    rule = Threshold(gate, bias_E=torch.tensor([-1.0, -0.5]))
    probs_TK = rule(torch.tensor([[2.0, 1.0]]), TOKENS).probs_TK
    assert probs_TK[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_the_cutoff_has_no_gradient_and_the_scores_have_that_of_the_gate() -> None:
    scores_TE = torch.tensor([[2.0, -1.0]], requires_grad=True)
    choices = Threshold(rules.sigmoid, bias_E=torch.zeros(2))(scores_TE, TOKENS)
    choices.probs_per_expert().sum().backward()
    slope = torch.sigmoid(torch.tensor(2.0)) * torch.sigmoid(torch.tensor(-2.0))
    assert scores_TE.grad is not None
    assert scores_TE.grad[0].tolist() == pytest.approx([float(slope), 0.0])


def test_positive_scores_choose_and_weigh():
    scores_TE = torch.tensor([[0.5, -1.0, 2.0, 0.0], [-1.0, -2.0, 0.0, -0.5], [1.0, 1.0, 1.0, 3.0]])
    choices = ReLU()(scores_TE, TOKENS)
    assert choices.experts_TK.tolist() == [[2, 0, -1, -1], [-1] * 4, [3, 0, 1, 2]]
    assert choices.probs_TK.tolist() == [[2.0, 0.5, 0, 0], [0.0] * 4, [3.0, 1, 1, 1]]
    assert choices.tokens_per_expert().tolist() == [2, 1, 2, 1]


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
