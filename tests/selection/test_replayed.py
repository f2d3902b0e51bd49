"""Replayed choices: the recorded experts, with the probs and gradients of the current scores."""

import pytest
import torch

from moe_parallel.selection import rules
from moe_parallel.selection.forced import Replayed
from moe_parallel.selection.rules import softmax
from moe_parallel.selection.segments import BySegment
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.expert_choice.rule import ExpertChoice, raw
from moe_parallel.systems.relu.rule import ReLU
from moe_parallel.systems.threshold.rule import Threshold
from moe_parallel.systems.top_p.rule import TopP

LN2, LN3 = torch.tensor([2.0, 3.0], dtype=torch.float64).log().tolist()


def replayed(rule, experts_TK, every=1):
    """The rule with these choices, and the tokens and numbers with which it asks for them."""
    asked = []

    def recorded(tokens, num_tokens, every):
        asked.append((tokens, num_tokens, every))
        return torch.tensor(experts_TK)

    return Replayed(rule, recorded, every), asked


def test_probs_worked_by_hand() -> None:
    """Scores ln 1, ln 2, ln 3: TopK would choose experts 2 and 1; the trace says 0 and 2."""
    scores_TE = torch.tensor([[0.0, LN2, LN3]], dtype=torch.float64, requires_grad=True)
    tokens = Tokens(1, layer=3, find_place=lambda: (7, 2))
    rule, asked = replayed(TopK(2), [[0, 2]])
    choices = rule(scores_TE, tokens)
    assert asked == [(tokens, 1, 1)]
    assert choices.experts_TK.tolist() == [[0, 2]]
    assert choices.probs_TK.tolist() == [pytest.approx([1 / 4, 3 / 4])]
    assert choices.all_chosen
    choices.probs_TK[0, 0].backward()
    # d softmax_0 / d score: p0 (1 - p0) and -p0 p2; the expert that was not chosen has none.
    assert scores_TE.grad.tolist() == [pytest.approx([3 / 16, 0, -3 / 16])]


CUTOFF_BIAS = torch.tensor([0.5, 0.0, -0.5, 0.25])
RULES = {
    "topk": TopK(2),
    "top_p": TopP(0.6),
    "expert choice": ExpertChoice(1.5, raw),
    "expert choice, softmax": ExpertChoice(2.0, softmax),
    "by segment": BySegment(ExpertChoice(1.0, softmax), 3),
    "relu": ReLU(),
    "threshold": Threshold(rules.sigmoid, bias_E=CUTOFF_BIAS),
    "threshold, softmax of chosen": Threshold(rules.softmax_of_chosen, 0.2, CUTOFF_BIAS),
}


@pytest.mark.parametrize("name", RULES)
def test_its_own_choices_give_the_same_to_the_bit(name: str) -> None:
    rule = RULES[name]
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(16, 4, generator=generator.manual_seed(0)).requires_grad_() for _ in range(2)
    )
    own = rule(first, Tokens(2))
    if isinstance(rule, BySegment):
        # The first tokens of the three segments of each of two sequences.
        inner, _ = replayed(rule.rule, own.experts_TK.view(8, 2, -1)[::3].flatten(0, 1).tolist())
        again = BySegment(inner, rule.length)(second, Tokens(2))
    else:
        again = replayed(rule, own.experts_TK.tolist())[0](second, Tokens(2))
    chosen = own.experts_TK >= 0
    assert torch.equal(own.experts_TK, again.experts_TK)
    assert torch.equal(own.probs_TK[chosen], again.probs_TK[chosen])
    weights = torch.randn(own.probs_TK.shape, generator=generator) * chosen
    for choices in (own, again):
        (choices.probs_TK * weights).sum().backward()
    assert torch.equal(first.grad, second.grad)


def test_a_bias_goes_by_the_ranking_of_the_rule_and_changes_no_choice() -> None:
    scores_TE = torch.tensor([[0.0, LN2, LN3]], dtype=torch.float64)
    rule, _ = replayed(TopK(1, ranking=torch.sigmoid), [[1]])
    biased = rule.with_bias(torch.tensor([9.0, 0.0, 0.0]))
    assert biased(scores_TE, Tokens(1)).experts_TK.tolist() == [[1]]
    assert biased.ranked(scores_TE).tolist() == [pytest.approx([1 / 2, 2 / 3, 3 / 4])]


def test_the_probs_of_a_threshold_know_its_cutoffs() -> None:
    """The trace says expert 0, whose value 0 - 1 is not above 0."""
    scores_TE = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    rule, _ = replayed(Threshold(rules.sigmoid_of_value), [[0, -1]])
    choices = rule.with_bias(torch.tensor([-1.0, 0.0]))(scores_TE, Tokens(1))
    assert choices.experts_TK.tolist() == [[0, -1]]
    assert choices.probs_TK[0, 0].item() == pytest.approx(0.2689, abs=1e-4)
    assert choices.values_TE is not None and choices.values_TE.tolist() == [[-1.0, 2.0]]


def test_the_softmax_of_a_threshold_is_over_the_recorded_experts() -> None:
    """The threshold would choose experts 0 and 1; the trace says 0 and 2."""
    scores_TE = torch.tensor([[LN2, LN3, 0.0]], dtype=torch.float64)
    rule, _ = replayed(Threshold(rules.softmax_of_chosen, level=0.5), [[0, 2, -1]])
    choices = rule(scores_TE, Tokens(1))
    assert choices.probs_TK[0, :2].tolist() == pytest.approx([2 / 3, 1 / 3])


def test_the_segments_of_a_micro_batch_keep_its_place() -> None:
    inner, asked = replayed(ExpertChoice(1.0, softmax), [[0, -1]] * 4, every=2)
    BySegment(inner, 2)(torch.zeros(8, 2), Tokens(2, layer=5, find_place=lambda: (3, 4)))
    [(tokens, *numbers)] = asked
    place = tokens.num_sequences, tokens.layer, tokens.iteration, tokens.first_sequence
    assert place == (2, 5, 3, 4) and numbers == [4, 2]


def test_a_recorded_token_without_experts_has_no_gradient_of_its_own() -> None:
    """As threshold rules record it; divided by their sum, its probs would be 0 / 0."""
    scores_TE = torch.tensor([[1.0, 0.0], [0.0, 2.0]], requires_grad=True)
    choices = TopP(0.5, renormalizes=True).of(scores_TE, torch.tensor([[-1, -1], [1, -1]]))
    assert choices.probs_TK.tolist() == [[0, 0], [1, 0]]
    choices.probs_TK.sum().backward()
    assert torch.equal(scores_TE.grad, torch.zeros(2, 2))
