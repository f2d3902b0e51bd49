"""What a model selects on texts: totals against loops over the tokens, the test, and files."""

import collections
import math

import numpy as np
import pytest
from pyarrow.parquet import ParquetFile

from moe_parallel.analysis import routing as files
from moe_parallel.analysis.routing import (
    AnalysisTotals,
    Blocks,
    SelectionsFile,
    mutual_information,
    read_facts,
    read_table,
    specialization,
    tables_of,
)
from moe_parallel.errors import InputError
from tests.analysis.selections import random_selections

PARTS = [
    random_selections("code", 0),
    random_selections("code", 3),
    random_selections("prose", 0, sequences=2),
]


@pytest.fixture(scope="module")
def totals() -> AnalysisTotals:
    found = AnalysisTotals([1, 2], 4, [str(item) for item in range(7)])
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
    ranks = list(zip(-vocabulary["experts_per_token"], vocabulary["token"], strict=True))
    assert ranks == sorted(ranks)
    assert tables["specialization"]["p"] == []


def blocks_of(shares, sequences=24, tokens=20, seed=0, layers=1):
    """Choices drawn with the probabilities shares[text] of the experts."""
    generator = np.random.default_rng(seed)
    blocks = Blocks(layers, len(next(iter(shares.values()))))
    for text, share in shares.items():
        for sample in range(sequences):
            blocks.add(
                text, sample, generator.multinomial(tokens, share, size=layers).astype(float)
            )
    return blocks


def test_by_hand():
    # Two texts, each with an expert of its own, and one that both use alike.
    assert mutual_information(np.array([[[4.0, 0]], [[0, 8.0]]])) == pytest.approx([math.log(2)])
    assert mutual_information(np.array([[[3.0, 1]], [[30.0, 10]]])) == pytest.approx([0])
    expected = 0.5 * (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)) * 2
    assert mutual_information(np.array([[[3.0, 1]], [[1, 3.0]]])) == pytest.approx([expected])
    # A text without choices counts as one that uses no expert.
    assert np.isfinite(mutual_information(np.array([[[0.0, 0]], [[1, 3.0]]]))).all()


def test_texts_that_differ():
    blocks = blocks_of({"a": [0.5, 0.3, 0.2], "b": [0.2, 0.3, 0.5]}, layers=2)
    one, two, mean = specialization(blocks, [3, 5], 199, seed=1)
    assert (one.layer, two.layer, mean.layer) == (3, 5, None)
    assert one.p == two.p == mean.p == 1 / 200
    texts, labels, counts = blocks.arrays()
    assert texts == ["a", "b"] and labels.tolist() == [0] * 24 + [1] * 24
    actual = mutual_information(np.stack([counts[:24].sum(axis=0), counts[24:].sum(axis=0)]))
    assert [one.mutual_information, two.mutual_information] == pytest.approx(actual)
    assert mean.mutual_information == pytest.approx(actual.mean())
    assert 0 < one.by_chance < one.mutual_information / 5
    assert specialization(blocks_of({"a": [0.5, 0.5]}), [1], 10, seed=0) == []


def test_texts_that_do_not_differ_are_rarely_found_to():
    """p is uniform then: 5% of many texts have p up to 0.05, and no fewer than a few."""
    same = [0.4, 0.35, 0.25]
    found = [
        specialization(blocks_of({"a": same, "b": same}, seed=seed), [1], 49, seed=seed)[0].p
        for seed in range(60)
    ]
    assert 0.35 < np.mean(found) < 0.65
    assert sum(p <= 0.1 for p in found) <= 16  # 6 expected; more than 16: one in 10,000


def test_sequences_are_not_taken_apart():
    """Each sequence has one expert for all its tokens. By chance, texts then differ much, and a
    test that permuted tokens would find a difference that is none."""
    generator = np.random.default_rng(0)
    blocks = Blocks(1, 2)
    for text in ("a", "b"):
        for sample in range(12):
            blocks.add(text, sample, np.eye(2)[generator.integers(2)][None] * 1000)
    (one, _) = specialization(blocks, [1], 199, seed=0)
    assert one.p > 0.02 and one.by_chance > 0.005


def test_neighbors_are_joined_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr("moe_parallel.analysis.routing.MOST_BLOCKS", 64)
    blocks = Blocks(1, 1)
    for sample in range(60):  # each in two parts
        blocks.add("a", sample, np.full((1, 1), float(sample - 1)))
        blocks.add("a", sample, np.ones((1, 1)))
    for sample in range(7):
        blocks.add("b", sample, np.full((1, 1), 100.0 + sample))
    _, labels, counts = blocks.arrays()
    assert blocks.sequences == 2 and labels.tolist() == [0] * 30 + [1] * 4
    assert counts[:30, 0, 0].tolist() == [4 * n + 1 for n in range(30)]
    assert counts[30:, 0, 0].tolist() == [201, 205, 209, 106]


ROWS = [random_selections("code", 0), random_selections("a <b>", 0), random_selections("code", 3)]


@pytest.mark.parametrize("rows_of_a_group", [1, 500_000])
def test_selections_are_rows(tmp_path, monkeypatch, rows_of_a_group):
    monkeypatch.setattr(files, "ROWS_OF_A_GROUP", rows_of_a_group)
    with SelectionsFile(tmp_path) as file:
        for part in ROWS:
            file.add(part)
    # Of each part, so that memory does not grow with the text; and small parts together.
    groups = ParquetFile(tmp_path / "selections.parquet").num_row_groups
    assert groups == (len(ROWS) if rows_of_a_group == 1 else 1)
    table = read_table(tmp_path, "selections")
    rows = list(zip(*table.values(), strict=True))
    expected = []
    for part in ROWS:
        for layer in part.layers:
            for place in range(len(part)):
                kept = layer.experts_TK[place] >= 0
                expected.append(
                    (
                        part.text, part.sample_T[place], part.position_T[place],
                        part.token_T[place], layer.layer,
                        layer.experts_TK[place][kept].tolist(),
                        layer.probs_TK[place][kept].tolist(),
                        layer.dropped_T[place], layer.entropy_T[place],
                    )
                )  # fmt: skip
    assert rows == expected and len(rows) == 3 * 15 * 2


def test_what_is_missing_or_damaged(tmp_path):
    for name, text in (("torn", "PAR1 and no more"), ("empty", "")):
        (tmp_path / f"{name}.parquet").write_text(text)
    for name in ("gone", "torn", "empty"):
        with pytest.raises(InputError, match=f"{name}.parquet is missing or damaged: repeat"):
            read_table(tmp_path, name)
    with pytest.raises(InputError, match=r"analysis.json cannot be read: repeat"):
        read_facts(tmp_path)
    (tmp_path / "analysis.json").write_text("[]")
    with pytest.raises(InputError, match=r"analysis.json cannot be read: repeat"):
        read_facts(tmp_path)
