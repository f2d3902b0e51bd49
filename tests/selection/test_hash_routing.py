"""Hash routing: its table, and choices that depend on the id of a token alone."""

import numpy
import pytest
import torch

from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.hash.rule import ByTokenId, greedy_table
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


def test_without_counts_the_experts_take_turns():
    assert greedy_table([0] * 5, 4, 2).tolist() == [[0, 1], [2, 3]] * 2 + [[0, 1]]


def test_zipfs_law_loads_the_experts_equally():
    """As long as no id is more frequent than the share of an expert."""
    counts = [10_000 // (rank + 3) for rank in range(2_000)]
    load_E = torch.zeros(8, dtype=torch.int64)
    for count, experts in zip(counts, greedy_table(counts, 8, 2).tolist(), strict=True):
        load_E[experts] += count
    assert load_E.max() / load_E.min() < 1.001


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


def test_neither_place_nor_batch_nor_scores_change_the_experts_of_an_id():
    table_VK = greedy_table([5, 1, 0, 7, 2], num_experts=3, k=2)
    rule = ByTokenId(TopK(2), lambda ids_T: table_VK[ids_T])
    generator = torch.Generator().manual_seed(0)
    for sequences in (1, 2, 5):
        ids_T = torch.randint(0, 5, (20,), generator=generator)
        scores_TE = 9 * torch.randn(20, 3, generator=generator)
        chosen_TK = rule(scores_TE, Tokens(sequences, ids_T=ids_T)).experts_TK
        assert [set(row) for row in chosen_TK.tolist()] == [
            set(table_VK[item].tolist()) for item in ids_T.tolist()
        ]
