"""Mutual information by hand, and the permutation test on texts that differ and that do not."""

import math

import numpy as np
import pytest

from moe_parallel.analysis.routing.specialization import (
    Blocks,
    mutual_information,
    specialization,
)


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


def test_a_single_text_has_no_test():
    assert specialization(blocks_of({"a": [0.5, 0.5]}), [1], 10, seed=0) == []


def test_neighbors_are_joined_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr("moe_parallel.analysis.routing.specialization.MOST_BLOCKS", 64)
    blocks = Blocks(1, 1)
    for sample in range(60):
        blocks.add("a", sample, np.full((1, 1), float(sample)))
    for sample in range(7):
        blocks.add("b", sample, np.full((1, 1), 100.0 + sample))
    _, labels, counts = blocks.arrays()
    assert blocks.sequences == 2 and labels.tolist() == [0] * 30 + [1] * 4
    assert counts[:30, 0, 0].tolist() == [4 * n + 1 for n in range(30)]
    assert counts[30:, 0, 0].tolist() == [201, 205, 209, 106]


def test_parts_of_a_sequence_are_one_block():
    blocks = Blocks(1, 2)
    blocks.add("a", 0, np.array([[1.0, 0]]))
    blocks.add("a", 0, np.array([[0.0, 2]]))
    blocks.add("a", 1, np.array([[5.0, 5]]))
    assert blocks.arrays()[2].tolist() == [[[1, 2]], [[5, 5]]]
