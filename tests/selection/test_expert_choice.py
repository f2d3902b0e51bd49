"""Expert choice: each expert's best tokens, on one rank and split over tensor-parallel ranks."""

import numpy
import pytest
import torch
from torch import distributed as dist

from moe_parallel.layers.dispatched import SplitTokens
from moe_parallel.layers.system import system_of
from moe_parallel.selection import rules
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems import AoEExpertChoiceSelection, ExpertChoiceSelection
from moe_parallel.systems.expert_choice.rule import ExpertChoice, raw, tokens_taken
from tests.distributed import run_distributed
from tests.oracles import routing as oracle

TOKENS = Tokens(2)
RANKINGS = {"raw": raw, "softmax": rules.softmax}


def _scores(tokens=24, experts=6, levels=None):
    scores = numpy.random.default_rng(0).normal(size=(tokens, experts))
    return scores if levels is None else numpy.round(scores * levels) / levels


def _chosen(choices: Choices) -> list[list[int]]:
    return [[e for e in row if e >= 0] for row in choices.experts_TK.tolist()]


@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("factor", [0.25, 1.0, 1.3, 2.0, 6.0])
def test_equals_the_transcription(ranking, factor):
    scores = _scores()
    wanted = oracle.expert_choice(scores, factor, by_softmax=ranking == "softmax")
    choices = ExpertChoice(factor, RANKINGS[ranking])(torch.from_numpy(scores), TOKENS)
    assert _chosen(choices) == wanted.experts
    for row, probs in zip(choices.probs_TK, wanted.probs, strict=True):
        numpy.testing.assert_allclose(row[: len(probs)].numpy(), probs, rtol=1e-12)
    numpy.testing.assert_allclose(
        choices.probabilities_TE.numpy(), wanted.probabilities, rtol=1e-12
    )


@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("factor", [0.25, 1.0, 1.3, 2.0, 6.0])
def test_ties_go_to_the_earlier_token(ranking, factor):
    scores = torch.from_numpy(_scores(levels=1))  # scores of one digit: many ties
    # Equal scores have unequal softmaxes where the sums round differently, and how they round
    # depends on the processor. The oracle therefore ranks the very numbers that the rule ranks.
    ranked = RANKINGS[ranking](scores).numpy()
    wanted = oracle.expert_choice(ranked, factor)
    assert _chosen(ExpertChoice(factor, RANKINGS[ranking])(scores, TOKENS)) == wanted.experts


@pytest.mark.parametrize(
    "factor, tokens, experts, taken",
    [
        (2.0, 64, 8, 16),
        (1.0, 64, 8, 8),
        (1.0, 7, 4, 2),  # 1.75
        (2.0, 7, 4, 4),  # 3.5: half rounds up
        (1.0, 10, 4, 3),  # 2.5: half rounds up
        (0.01, 8, 4, 1),  # at least one
        (4.0, 7, 4, 7),  # all
        (1.0, 1, 8, 1),
        (1.15, 100, 10, 12),  # 11.5, but slightly less in floating point
    ],
)
def test_tokens_taken(factor, tokens, experts, taken):
    assert tokens_taken(factor, tokens, experts) == taken


@pytest.mark.parametrize("kind", [ExpertChoiceSelection, AoEExpertChoiceSelection])
@pytest.mark.parametrize("factor, k", [(0.3, 1), (1.0, 1), (2.0, 2), (3.7, 4)])
def test_tokens_choose_in_evaluations(kind, factor, k):
    for scores, ranking, gate in (
        ("raw", raw, rules.raw_score),
        ("softmax", rules.softmax, rules.raw_probability),
    ):
        selection = kind(moe_expert_choice_capacity_factor=factor, moe_expert_choice_scores=scores)
        training, evaluation = system_of(selection).rules(selection)
        assert training == ExpertChoice(factor, ranking)
        assert evaluation == TopK(k, gate)


def _choices_of_a_part(levels):
    tokens = SplitTokens(2, dist.group.WORLD)
    found = {}
    for name, ranking in RANKINGS.items():
        part = tokens.of_this_rank(torch.from_numpy(_scores(levels=levels))).requires_grad_()
        choices = ExpertChoice(1.3, ranking)(part, tokens)
        (choices.probs_TK * (choices.experts_TK + 2)).sum().backward()
        found[name] = (_chosen(choices), choices.probs_TK.detach().numpy(), part.grad.numpy())
    return found


@pytest.mark.parametrize("levels", [None, 1])
def test_tensor_parallel_ranks_choose_among_the_tokens_of_all(levels):
    ranks = run_distributed(2, _choices_of_a_part, levels)
    for name, ranking in RANKINGS.items():
        scores = torch.from_numpy(_scores(levels=levels)).requires_grad_()
        whole = ExpertChoice(1.3, ranking)(scores, TOKENS)
        (whole.probs_TK * (whole.experts_TK + 2)).sum().backward()
        assert sum((rank[name][0] for rank in ranks), []) == _chosen(whole)
        for index, wanted in ((1, whole.probs_TK.detach()), (2, scores.grad)):
            found = numpy.concatenate([rank[name][index] for rank in ranks])
            numpy.testing.assert_array_equal(found, wanted.numpy())
