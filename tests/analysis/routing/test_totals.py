"""Totals, compared with loops over the tokens."""

import collections
import math

import numpy as np
import pytest

from moe_parallel.analysis.routing.tables import tables_of
from moe_parallel.analysis.routing.totals import AnalysisTotals
from moe_parallel.analysis.routing.vocabulary import Vocabulary
from tests.analysis.routing.selections import random_selections

PARTS = [
    random_selections("code", 0),
    random_selections("code", 3),
    random_selections("prose", 0, sequences=2),
]


@pytest.fixture(scope="module")
def totals() -> AnalysisTotals:
    found = AnalysisTotals([1, 2], 4, Vocabulary([str(item) for item in range(7)]))
    for part in PARTS:
        found.add(part)
    return found


def choices(text, layer):
    """The experts of each token: lists."""
    return [
        [int(expert) for expert in row if expert >= 0]
        for part in PARTS
        if part.text == text
        for row in part.layers[layer].experts_TK
    ]


@pytest.mark.parametrize(("text", "tokens"), [("code", 30), ("prose", 10)])
@pytest.mark.parametrize("layer", [0, 1])
def test_loads_and_entropies(totals, text, tokens, layer):
    mine, rows = totals.texts[text], choices(text, layer)
    counts = collections.Counter(expert for row in rows for expert in row)
    assert mine.tokens == tokens == len(rows)
    assert mine.shares_GE[layer].tolist() == [counts[expert] for expert in range(4)]
    shares = [counts[expert] / sum(counts.values()) for expert in range(4)]
    assert mine.load_GE()[layer] == pytest.approx(shares)
    assert mine.ent_load_G()[layer] == pytest.approx(-sum(s * math.log(s) for s in shares if s))
    assert mine.mean_G(mine.experts_G)[layer] == pytest.approx(sum(map(len, rows)) / tokens)
    layers = [part.layers[layer] for part in PARTS if part.text == text]
    entropy = sum(float(value) for each in layers for value in each.entropy_T)
    assert mine.entropy_G[layer] == pytest.approx(entropy)
    assert mine.dropped_G[layer] == sum(int(each.dropped_T.sum()) for each in layers)


@pytest.mark.parametrize("layer", [0, 1])
def test_pairs(totals, layer):
    pairs = collections.Counter(
        (one, other)
        for text in ("code", "prose")
        for row in choices(text, layer)
        for one in set(row)
        for other in set(row)
    )
    expected = [[pairs[one, other] for other in range(4)] for one in range(4)]
    assert totals.pairs_GEE[layer].tolist() == expected


def test_items(totals):
    times, experts = collections.Counter(), collections.Counter()
    for part in PARTS:
        for place, item in enumerate(part.token_T.tolist()):
            used = [sum(each.experts_TK[place] >= 0) for each in part.layers]
            times[item] += 1
            experts[item] += sum(used) / 2
    assert totals.vocabulary.tokens_V.tolist() == [times[item] for item in range(7)]
    assert totals.vocabulary.experts_V == pytest.approx([experts[item] for item in range(7)])


def test_tables_have_every_number_once(totals):
    tables = tables_of(totals, [])
    loads = list(zip(*tables["loads"].values(), strict=True))
    assert len(loads) == 2 * 2 * 4
    for text, layer, expert, tokens, share in loads:
        of_text = totals.texts[text]
        assert tokens == of_text.shares_GE[layer - 1, expert]
        assert share == of_text.load_GE()[layer - 1, expert]
    layers = list(zip(*tables["layers"].values(), strict=True))
    assert [row[:3] for row in layers] == [
        ("code", 1, 30), ("code", 2, 30), ("prose", 1, 10), ("prose", 2, 10),
    ]  # fmt: skip
    assert [row[6] for row in layers][:2] == totals.texts["code"].dropped_G.tolist()
    pairs = list(zip(*tables["pairs"].values(), strict=True))
    assert len(pairs) == 2 * 10
    assert all(totals.pairs_GEE[g - 1, i, j] == tokens for g, i, j, tokens in pairs)
    vocabulary = tables["vocabulary"]
    assert sum(vocabulary["occurrences"]) == 40
    assert (np.diff(vocabulary["experts_per_token"]) <= 0).all()
    assert tables["specialization"]["p"] == []


def test_the_size_does_not_grow_with_the_tokens():
    """The arrays of the totals after 100 sequences, and after 6,000: more than blocks."""

    def size(sequences: int) -> int:
        found = AnalysisTotals([1, 2], 4, Vocabulary(["a"] * 7))
        for first in range(0, sequences, 100):
            found.add(random_selections("t", first, sequences=100, length=2))
        _, labels_N, counts_NGE = found.blocks.arrays()
        assert found.tokens == 2 * sequences
        return len(labels_N), counts_NGE.sum(), found

    few, _, _ = size(100)
    many, counted, found = size(6000)
    assert few == 100 and many == 1500  # joined twice: at more than 2,048, and at 4,096
    assert found.blocks.sequences == 4
    assert counted == found.texts["t"].shares_GE.sum()
