"""Means, shifts and merges of segments, worked by hand; rules that route segments."""

from typing import Any

import numpy
import pytest
import torch

from moe_parallel.layers.dispatched import SplitTokens
from moe_parallel.selection import rules
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.rules import own, shifted, uniform
from moe_parallel.selection.segments import (
    BySegment,
    Merges,
    by_first,
    by_previous,
    means_of,
    segment_sums,
    segment_sums_of_share,
)
from moe_parallel.selection.tokens import Tokens, take, zigzag
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.expert_choice.rule import ExpertChoice, raw
from tests.distributed import run_distributed
from tests.oracles import merging as oracle


def segment_means(x_SBX: torch.Tensor, length: int) -> torch.Tensor:
    return means_of(segment_sums(x_SBX, length), len(x_SBX), length)


def test_a_short_segment_is_divided_by_its_own_length():
    x_SBX = torch.tensor([[1.0, 10.0], [3.0, 30.0], [5.0, 50.0]])[..., None]
    assert segment_means(x_SBX, 2).squeeze(-1).tolist() == [[2.0, 20.0], [5.0, 50.0]]
    assert segment_means(x_SBX, 4).squeeze(-1).tolist() == [[3.0, 30.0]]
    assert segment_means(x_SBX, 1).equal(x_SBX)


def test_means_of_bf16_are_fp32():
    ones = torch.ones(257, 1, 1, dtype=torch.bfloat16)  # bf16 cannot count beyond 256
    mean = segment_means(ones, 257)
    assert mean.dtype == torch.float32
    assert mean.item() == 1.0
    assert segment_means(ones.double(), 257).dtype == torch.float64


@pytest.mark.parametrize("length", [1, 3, 4, 5, 12, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_sums_of_shares_add_up(ranks: int, length: int) -> None:
    x_SBX = torch.arange(12 * 2 * 3.0).view(12, 2, 3)
    total = sum(
        segment_sums_of_share(take(x_SBX, share := zigzag(12, ranks, rank)), share, 12, length)
        for rank in range(ranks)
    )
    assert torch.equal(total, segment_sums(x_SBX, length))


def test_the_merges_of_a_share() -> None:
    w_MBE = torch.tensor([0.0, 1.0, 2.0]).view(3, 1, 1)
    merges = Merges([5, 5, 2], w_MBE)
    shares = [merges.within(zigzag(12, 3, rank)) for rank in range(3)]
    # Positions 0, 1, 10, 11; then 2, 3, 8, 9; then 4 to 7, of which 4 is in the first stretch.
    assert [share.sizes for share in shares] == [[2, 2], [2, 2], [1, 3]]
    assert [share.weights_MBE.flatten().tolist() for share in shares] == [[0, 2], [0, 1], [0, 1]]
    assert merges.within([range(12)]).sizes == merges.sizes


def weights() -> torch.Tensor:
    """e of three segments of two sequences, for two experts."""
    first = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    return torch.stack([first, 1 - first], dim=2).requires_grad_()


def test_each_sequence_is_shifted_by_itself():
    e_GBE = weights()
    assert shifted(e_GBE, own)[..., 0].tolist() == e_GBE[[0, 0, 1], :, 0].tolist()
    assert shifted(e_GBE, uniform)[0].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert shifted(e_GBE, uniform)[1:].equal(e_GBE[:-1])


@pytest.mark.parametrize("first", [own, uniform])
def test_the_first_segment_has_no_gradient_and_the_last_none_either(first):
    e_GBE = weights()
    (shifted(e_GBE, first) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]).sum().backward()
    assert e_GBE.grad[..., 0].tolist() == [[10.0, 10.0], [100.0, 100.0], [0.0, 0.0]]


def test_merges_by_the_segment_before():
    e_GBE = weights()
    merges = by_previous(e_GBE, [4, 4, 2], own)
    assert merges.sizes == [4, 4, 2]
    assert merges.tokens_MB().tolist() == [[4.0, 4.0], [4.0, 4.0], [2.0, 2.0]]
    x_SBD = torch.arange(20.0).view(10, 2, 1)
    (whole, e_whole), (short, e_short) = merges.parts(x_SBD)
    assert whole.shape == (2, 4, 2, 1) and short.shape == (1, 2, 2, 1)
    assert torch.cat([whole.flatten(0, 1), short.flatten(0, 1)]).equal(x_SBD)
    assert torch.cat([e_whole, e_short]).equal(merges.weights_MBE)


@pytest.mark.parametrize("first", [own, uniform])
def test_merges_by_the_first_segment(first):
    e_GBE = weights()
    merges = by_first(e_GBE, [4, 4, 2], first)
    assert merges.sizes == [4, 6]
    assert merges.weights_MBE[0].equal(first(e_GBE)[0])
    assert merges.weights_MBE[1].equal(e_GBE[0])
    alone = by_first(e_GBE[:1], [3], first)
    assert alone.sizes == [3] and alone.weights_MBE.equal(first(e_GBE))
    alone.weights_MBE.sum().backward()
    assert (e_GBE.grad == 0).all()


# One sequence: two segments of two tokens and a short one; two experts, scores worked by hand.
SCORES = [[1.0, 0.0], [3.0, 0.0], [0.0, 4.0], [0.0, 2.0], [9.0, 9.0]]
JUDGED = [[2.0, 0.0], [2.0, 0.0], [0.0, 3.0]]  # segment 1 by itself, 2 by 1, 3 by 2


def test_segments_are_judged_by_the_one_before():
    chosen = BySegment(TopK(1, rules.raw_score), 2)(torch.tensor(SCORES), Tokens(1))
    assert chosen.scores_TE.tolist() == [JUDGED[0]] * 2 + [JUDGED[1]] * 2 + [JUDGED[2]]
    assert chosen.experts_TK.tolist() == [[0], [0], [0], [0], [1]]
    assert chosen.probs_TK.tolist() == [[2.0], [2.0], [2.0], [2.0], [3.0]]


def test_the_first_segment_gives_scores_no_gradient():
    scores = torch.tensor(SCORES, requires_grad=True)
    chosen = BySegment(TopK(1, rules.raw_score), 2)(scores, Tokens(1))
    chosen.probs_TK[:2].sum().backward(retain_graph=True)
    assert (scores.grad == 0).all()
    chosen.probs_TK[2:].sum().backward()
    # Two tokens depend on the mean of the first two tokens, one on that of the next two.
    assert scores.grad.tolist() == [[1.0, 0.0], [1.0, 0.0], [0.0, 0.5], [0.0, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize("raw_scores", [False, True])
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("tokens, sequences, length", [(8, 3, 2), (7, 2, 3), (3, 2, 5)])
def test_experts_choose_as_in_the_oracle(tokens, sequences, length, factor, raw_scores):
    scores = numpy.random.default_rng(0).normal(size=(tokens, sequences, 4)).astype("float32")
    chosen = _experts_choose(scores, length, factor, raw_scores, Tokens(sequences))
    wanted, taken = _expected(scores, length, factor, raw_scores)
    assert _rows(chosen) == [
        {e: pytest.approx(g, rel=1e-5, abs=1e-6) for e, g in zip(experts, probs, strict=True)}
        for experts, probs in zip(wanted.experts, wanted.probs, strict=True)
    ]
    sizes = [len(segment) for segment in oracle.segments(tokens, length)] * sequences
    for expert in range(4):
        tokens_taken = sum(row.count(expert) for row in wanted.experts)
        assert chosen.tokens_per_expert()[expert] == tokens_taken
        if len(set(sizes)) == 1:
            assert tokens_taken == taken * sizes[0]


def _experts_choose(scores_SBE, length, factor, raw_scores, tokens) -> Choices:
    rule = ExpertChoice(factor, raw if raw_scores else rules.softmax)
    scores_TE = torch.from_numpy(scores_SBE).flatten(0, 1)
    return BySegment(rule, length)(scores_TE, tokens)


def _expected(scores_SBE, length, factor, raw_scores):
    """The oracle's router with the identity as its weights returns means of its input."""
    identity = numpy.eye(scores_SBE.shape[2])
    first = oracle.first_logits(scores_SBE, identity, length)
    logits = oracle.segment_logits(scores_SBE, identity, length, first)
    return oracle.segment_expert_choice(logits, length, factor, raw_scores)


def _rows(chosen: Choices) -> list[dict[int, float]]:
    """The probs of each token by expert."""
    rows = zip(chosen.experts_TK.tolist(), chosen.probs_TK.tolist(), strict=True)
    return [{e: g for e, g in zip(*row, strict=True) if e >= 0} for row in rows]


def _split_over(sequence_shares: int, scores: numpy.ndarray, length: int) -> Any:
    """The choices of a rank that has a part of every sequence, and the gradients of its probs."""
    tp = torch.distributed.group.WORLD
    mine = numpy.split(scores, sequence_shares)[tp.rank()]
    leaf = torch.from_numpy(mine).flatten(0, 1).requires_grad_()
    rule = BySegment(TopK(2, rules.raw_probability), length)
    split = SplitTokens(scores.shape[1], tp)
    chosen = rule(leaf, split)
    # A loss to which every token contributes by its position in the sequence.
    places = torch.arange(1.0, len(scores) + 1).chunk(sequence_shares)[tp.rank()]
    (chosen.probs_TK[:, 0] * places.repeat_interleave(scores.shape[1])).sum().backward()
    return _rows(_experts_choose(mine, length, 1.0, False, split)), _rows(chosen), leaf.grad.numpy()


def test_segments_may_span_ranks():
    scores = numpy.random.default_rng(1).normal(size=(8, 2, 4)).astype("float32")
    (whole,) = run_distributed(1, _split_over, 1, scores, 3)
    halves = run_distributed(2, _split_over, 2, scores, 3)
    for which in (0, 1):
        rows = [row for half in halves for row in half[which]]
        assert rows == [
            {e: pytest.approx(g, rel=1e-5) for e, g in row.items()} for row in whole[which]
        ]
    gradient = numpy.concatenate([half[2] for half in halves])
    numpy.testing.assert_allclose(gradient, whole[2], rtol=1e-4, atol=1e-6)
