"""Top-K of logits and the gates of norms, against a per-token transcription."""

import numpy
import pytest
import torch

from moe_parallel.selection.choices import Choices
from moe_parallel.selection.topk import gates_of_norms, topk_of_logits
from tests.oracles import layers as oracle

SHAPES = [(1, 1, 1), (9, 4, 2), (9, 5, 5), (30, 7, 3), (0, 4, 2)]  # T, E, K


def _scores(tokens, experts):
    return numpy.random.default_rng(0).normal(size=(tokens, experts)).astype("float32")


@pytest.mark.parametrize("tokens, experts, k", [shape for shape in SHAPES if shape[2] > 1])
def test_gates_are_a_softmax_over_the_selected(tokens, experts, k):
    scores = _scores(tokens, experts)
    wanted = oracle.route(scores, k)
    choices = topk_of_logits(torch.from_numpy(scores), k)
    assert choices.experts_TK.tolist() == wanted.experts
    assert choices.experts_TK.dtype == torch.int64
    numpy.testing.assert_allclose(
        choices.gates_TK.numpy(), numpy.reshape(wanted.gates, (tokens, k)), rtol=1e-6
    )
    again = gates_of_norms(torch.from_numpy(scores), choices.experts_TK)
    numpy.testing.assert_array_equal(again.gates_TK.numpy(), choices.gates_TK.numpy())


@pytest.mark.parametrize("tokens, experts", [(1, 1), (9, 4), (30, 7)])
def test_the_gate_of_a_single_choice_is_its_raw_probability(tokens, experts):
    scores = _scores(tokens, experts)
    wanted = oracle.route(scores, 1, raw_probability=True)
    choices = topk_of_logits(torch.from_numpy(scores), 1)
    assert choices.experts_TK.tolist() == wanted.experts
    numpy.testing.assert_allclose(choices.gates_TK.numpy(), wanted.gates, rtol=1e-6)


def test_a_single_autonomous_expert_has_gate_one():
    norms = torch.tensor([[1.0, 3.0, 2.0]])
    assert gates_of_norms(norms, torch.tensor([[1]])).gates_TK.tolist() == [[1.0]]


@pytest.mark.parametrize("k", [1, 2])
def test_gradients_reach_the_logits(k):
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: topk_of_logits(x, k).gates_TK, logits)


def test_counts_leave_empty_slots_out():
    choices = Choices(torch.tensor([[0, 2], [-1, 2], [2, -1]]), torch.ones(3, 2), torch.ones(3, 4))
    assert choices.tokens_per_expert().tolist() == [1.0, 0.0, 3.0, 0.0]
    none = Choices(torch.full((3, 2), -1), torch.ones(3, 2), torch.ones(3, 4))
    assert none.tokens_per_expert().tolist() == [0.0] * 4
