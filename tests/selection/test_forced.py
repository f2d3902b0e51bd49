"""Forced routing: exact loads, the system's own probs, and the same choices everywhere."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from moe_parallel.selection.choices import Choices
from moe_parallel.selection.forced import (
    Balanced,
    Forced,
    Hot,
    Workload,
    Zipf,
    shares_of,
)
from moe_parallel.selection.rules import raw_probability
from moe_parallel.selection.tokens import Share, Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.top_p.rule import TopP

ONE = 2**32
LENGTH, SEQUENCES, EXPERTS = 120, 2, 6
WORKLOADS = {
    "balanced": Balanced(),
    "hot": Hot(0.75),
    "one expert": Hot(1.0),
    "zipf": Zipf(1.0),
}
RULES = {"top1": TopK(1, raw_probability), "top2": TopK(2), "all": TopK(6), "top_p": TopP(0.6)}


def scores(tokens: int = LENGTH * SEQUENCES, experts: int = EXPERTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, experts, generator=generator, dtype=torch.float64)


def forced(workload: Workload, rule: TopK | TopP, layer: int = 1, iteration: int = 0) -> Choices:
    tokens = Tokens(SEQUENCES, layer=layer, find_place=lambda: (iteration, 0))
    return Forced(rule, workload, 7)(scores(), tokens)


def test_shares_worked_by_hand() -> None:
    assert shares_of([1, 1, 1, 1], 2) == [ONE // 2] * 4
    assert shares_of([3, 1], 1) == [3 * ONE // 4, ONE // 4]
    # In proportion, the first would have 2 * 8 / 10 of the tokens; it has all, and the others half.
    assert shares_of([8, 1, 1], 2) == [ONE, ONE // 2, ONE // 2]
    # Then the second exceeds 1 as well: 2 * 3 / 4.
    assert shares_of([16, 3, 1], 3) == [ONE, ONE, ONE]
    assert shares_of([96, 3, 0.5, 0.5], 3) == [ONE, ONE, ONE // 2, ONE // 2]
    assert shares_of([1, 0, 0], 1) == [ONE, 0, 0]
    assert shares_of([1, 0, 0], 2) == [ONE, ONE // 2, ONE // 2]  # somebody has to
    assert shares_of([0, 0], 1) == [ONE // 2, ONE // 2]
    assert shares_of([1, 2, 4], 0) == [0, 0, 0]
    assert sum(shares_of([1 / 3, 1 / 7, 0.1, 5e-4], 2)) == 2 * ONE


def test_the_weights_of_each_workload() -> None:
    def shares(workload: Workload, experts: int, k: int) -> list[float]:
        return [share / ONE for share in shares_of(workload.weights(experts, k), k)]

    assert shares(Balanced(), 8, 2) == [0.25] * 8
    assert shares(Hot(0.5), 5, 1) == [0.5] + [0.125] * 4
    assert shares(Hot(0.75), 6, 2) == [0.75] + [0.25] * 5
    assert shares(Hot(0.5), 1, 1) == [1]
    assert shares(Zipf(1.0), 3, 1) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert shares(Zipf(2.0), 2, 1) == pytest.approx([0.8, 0.2])


@pytest.mark.parametrize("rule", ["top1", "top2", "all"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_sequence_has_the_load_that_the_shares_say(name: str, rule: str) -> None:
    k = RULES[rule].k  # type: ignore[union-attr]
    choices = forced(WORKLOADS[name], RULES[rule])
    weights = WORKLOADS[name].weights(EXPERTS, k)
    for sequence in range(SEQUENCES):
        experts = choices.experts_TK[sequence::SEQUENCES]
        counts = Counter(experts.flatten().tolist())
        for expert, share in enumerate(shares_of(weights, k)):
            assert abs(counts[expert] - LENGTH * share / ONE) < 1, expert
    assert choices.all_chosen


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_only_who_is_chosen_changes(name: str, rule: str) -> None:
    own = RULES[rule](scores(), Tokens(SEQUENCES))
    choices = forced(WORKLOADS[name], RULES[rule])
    assert choices.scores_TE.equal(own.scores_TE)
    assert choices.probabilities_TE.equal(own.probabilities_TE)
    probabilities = torch.softmax(scores(), 1)
    for token, row in enumerate(choices.experts_TK.tolist()):
        chosen = [expert for expert in row if expert >= 0]
        assert len(chosen) == int((own.experts_TK[token] >= 0).sum())
        assert len(set(chosen)) == len(chosen) and max(chosen) < EXPERTS
        assert row[: len(chosen)] == chosen  # empty slots come last
        ranked = [scores()[token, expert].item() for expert in chosen]
        assert ranked == sorted(ranked, reverse=True)
        expected = probabilities[token, chosen]
        if rule in ("top2", "all"):
            expected = expected / expected.sum()
        torch.testing.assert_close(choices.probs_TK[token, : len(chosen)], expected)


def test_choices_depend_on_seed_layer_and_iteration() -> None:
    first = forced(Zipf(1.0), TopK(2))
    assert forced(Zipf(1.0), TopK(2)).experts_TK.equal(first.experts_TK)
    others = [
        forced(Zipf(1.0), TopK(2), layer=2),
        forced(Zipf(1.0), TopK(2), iteration=1),
        Forced(TopK(2), Zipf(1.0), 8)(scores(), Tokens(SEQUENCES)),
    ]
    for other in others:
        assert not other.experts_TK.equal(first.experts_TK)
        # The load is the same up to the place at which it is rounded.
        difference = other.tokens_per_expert() - first.tokens_per_expert()
        assert difference.abs().max() <= SEQUENCES


@dataclass(frozen=True)
class Stretch(Tokens):
    """One of several stretches of every sequence, as a tensor-parallel rank holds it."""

    number: int = 0
    of: int = 1

    @property
    def num_shares(self) -> int:
        return self.of

    def share(self, num_tokens: int) -> Share:
        here = num_tokens // self.num_sequences
        return [range(self.number * here, (self.number + 1) * here)]


@pytest.mark.parametrize("rule", ["top2", "top_p"])
def test_stretches_and_micro_batches_have_the_choices_of_the_whole(rule: str) -> None:
    force, whole = Forced(RULES[rule], Zipf(1.0), 7), scores()
    expected = force(whole, Tokens(SEQUENCES)).experts_TK
    stretches = [
        force(part, Stretch(SEQUENCES, number=n, of=4)).experts_TK
        for n, part in enumerate(whole.chunk(4))
    ]
    assert torch.cat(stretches).equal(expected)
    for sequence in range(SEQUENCES):
        alone = force(whole[sequence::SEQUENCES], Tokens(1)).experts_TK
        assert alone.equal(expected[sequence::SEQUENCES])
