"""Filters of logits: compared with transformers', and with probabilities worked out by hand."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moe_parallel.errors import InputError
from moe_parallel.generation.sampling import (
    MinP,
    RepetitionPenalty,
    Sampler,
    Sampling,
    Temperature,
    TopKFilter,
    TopPFilter,
)

TOKENS = [[1, 5, 5], [2, 0, 9]]


def some_logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(2, 12, generator=torch.Generator().manual_seed(seed))


PEERS = [
    (Temperature(0.7), TemperatureLogitsWarper(0.7)),
    (TopKFilter(4), TopKLogitsWarper(4)),
    (TopKFilter(50), TopKLogitsWarper(50)),
    (TopPFilter(0.6), TopPLogitsWarper(0.6)),
    (TopPFilter(0.001), TopPLogitsWarper(0.001)),
    (MinP(0.2), MinPLogitsWarper(0.2)),
    (RepetitionPenalty(1.3), RepetitionPenaltyLogitsProcessor(1.3)),
]


@pytest.mark.parametrize(("ours", "theirs"), PEERS, ids=lambda each: type(each).__name__)
def test_a_filter_does_what_that_of_transformers_does(ours, theirs) -> None:
    for seed in range(20):
        logits = some_logits(seed)
        expected = theirs(torch.tensor(TOKENS), logits.clone())
        torch.testing.assert_close(ours(logits, TOKENS), expected)


def test_all_together_in_the_order_of_transformers() -> None:
    sampling = Sampling(0.6, top_k=8, top_p=0.9, min_p=0.05, repetition_penalty=1.5)
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.5),
            TemperatureLogitsWarper(0.6),
            TopKLogitsWarper(8),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ]
    )
    for seed in range(20):
        logits = expected = some_logits(seed)
        for each in sampling.filters():
            logits = each(logits, TOKENS)
        expected = theirs(torch.tensor(TOKENS), expected.clone())
        torch.testing.assert_close(logits, expected)


def kept(logits: torch.Tensor) -> list[int]:
    return torch.isfinite(logits[0]).nonzero().flatten().tolist()


def test_by_hand() -> None:
    # Probabilities 0.5, 0.25, 0.15 and 0.1, in another order.
    logits = torch.tensor([[0.25, 0.1, 0.5, 0.15]]).log()
    assert kept(TopKFilter(2)(logits, [[]])) == [0, 2]
    assert kept(TopPFilter(0.5)(logits, [[]])) == [2]
    assert kept(TopPFilter(0.7)(logits, [[]])) == [0, 2]
    assert kept(TopPFilter(0.8)(logits, [[]])) == [0, 2, 3]
    assert kept(MinP(0.4)(logits, [[]])) == [0, 2]
    penalized = RepetitionPenalty(2.0)(torch.tensor([[3.0, -1.0, 0.5]]), [[0, 1, 1]])
    assert penalized.tolist() == [[1.5, -2.0, 0.5]]


def test_nothing_is_filtered_by_default() -> None:
    assert Sampling().filters() == []


def test_greedy_takes_the_most_probable_after_the_penalty() -> None:
    sampler = Sampler(Sampling(temperature=0, repetition_penalty=4), seed=0, numbers=range(2))
    logits = torch.tensor([[2.0, 1.9, 0.0], [2.0, 1.9, 0.0]])
    assert sampler.draw(logits, [0, 1], [[0], [1]]) == [1, 0]


def test_tokens_are_drawn_by_their_probabilities() -> None:
    probabilities = [0.5, 0.25, 0.15, 0.1]
    logits = torch.tensor([probabilities]).log().repeat(2000, 1)
    sampler = Sampler(Sampling(), seed=3, numbers=range(2000))
    drawn = sampler.draw(logits, range(2000), [[]] * 2000)
    for token, p in enumerate(probabilities):
        assert abs(drawn.count(token) - 2000 * p) < 5 * math.sqrt(2000 * p * (1 - p))


def test_what_is_drawn_depends_on_the_seed_and_the_number_alone() -> None:
    def draw(seed: int, numbers: list[int]) -> list[list[int]]:
        sampler = Sampler(Sampling(), seed, numbers)
        logits = torch.zeros(len(numbers), 1000)
        rows = list(range(len(numbers)))
        return [sampler.draw(logits, rows, [[]] * len(rows)) for _ in range(3)]

    both = draw(0, [4, 7])
    assert both == draw(0, [4, 7]) != draw(1, [4, 7])
    assert [tokens[1] for tokens in both] == [tokens[0] for tokens in draw(0, [7])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "--temperature is -0.1: it must be at least 0"),
        ({"temperature": math.nan}, "--temperature is nan: it must be at least 0"),
        ({"top_k": 0}, "--top-k is 0: it must be at least 1"),
        ({"top_p": 0.0}, "--top-p is 0.0: it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "--top-p is 1.1: it must be above 0 and at most 1"),
        ({"min_p": 1.5}, "--min-p is 1.5: it must be at least 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty is 0.0: it must be above 0"),
        ({"repetition_penalty": math.inf}, "--repetition-penalty is inf: it must be above 0"),
    ],
)
def test_values_out_of_range(options, message) -> None:
    with pytest.raises(InputError) as raised:
        Sampling(**options).check()
    assert str(raised.value) == message
