"""Hash routing: its table, also as a part of the model, and choices by the id of a token alone."""

import numpy
import pytest
import torch

from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.hash.rule import ByTokenId, HashTable, greedy_table
from tests.oracles import routing


def test_a_table_by_hand():
    # Frequencies are counts + 1. Id 3 (8) takes experts 0 and 1, id 0 (6) then 2 and 0, loaded 0
    # and 8, id 4 (3) 2 and 1, loaded 6 and 8, id 1 (2) 2 and 1, loaded 9 and 11, and id 2 (1) the
    # same.
    table = greedy_table([5, 1, 0, 7, 2], num_experts=3, k=2)
    assert table.tolist() == [[2, 0], [2, 1], [2, 1], [0, 1], [2, 1]]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_equals_filling_by_search(k):
    counts = numpy.random.default_rng(k).integers(0, 6, size=40).tolist()
    assert greedy_table(counts, 5, k).tolist() == routing.fill_table(counts, 5, k)


def test_ids_choose_and_scores_weigh():
    table_VK = greedy_table([5, 1, 0, 7, 2], num_experts=3, k=2)
    rule = ByTokenId(TopK(2), lambda ids_T: table_VK[ids_T])
    scores_TE = torch.tensor([[0.0, 1.0, 3.0], [0.0, 1.0, -3.0]], requires_grad=True)
    choices = rule(scores_TE, Tokens(1, ids_T=torch.tensor([4, 4])))
    assert choices.experts_TK.tolist() == [[2, 1], [1, 2]]  # the same experts, best first
    shares_TK = torch.tensor([[3.0, 1.0], [1.0, -3.0]]).softmax(1)
    torch.testing.assert_close(choices.probs_TK, shares_TK)
    choices.probs_TK[0, 0].backward()
    assert (scores_TE.grad[0] != 0).tolist() == [False, True, True]


def test_a_model_that_is_loaded_has_the_table_that_was_saved() -> None:
    """The text of the run that goes on may have other counts, and so make another table."""
    saved = HashTable(torch.tensor([[2], [0], [1]]))
    loaded = HashTable(torch.tensor([[0], [1], [2]]))
    loaded.load_state_dict(saved.state_dict())
    assert loaded(torch.tensor([0, 1, 2, 0])).tolist() == [[2], [0], [1], [2]]
