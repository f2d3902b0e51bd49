"""A fit finds known scales and columns again, and it improves the ranking."""

import numpy
import pytest
import torch

from moe_parallel.convert.gate import (
    cross_entropy,
    ranking_columns,
    shared_offset,
)

T, E, D, K = 600, 5, 8, 2


def draw(seed, *shape):
    return torch.from_numpy(numpy.random.default_rng(seed).normal(size=shape))


def ranked(scores, k=K):
    """The K largest of each row, as sets, by sorting in numpy."""
    return [set(row) for row in numpy.argsort(-numpy.asarray(scores), axis=1)[:, :k]]


def test_cross_entropy_by_hand():
    scores = torch.tensor([[0.0, 0.0], [numpy.log(3.0), 0.0]])
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    expected = (numpy.log(2) - 0.5 * numpy.log(0.75) - 0.5 * numpy.log(0.25)) / 2
    assert float(cross_entropy(scores, logits)) == pytest.approx(expected)


def test_an_offset_turns_logits_into_norms_where_activations_have_a_side():
    x, w = draw(2, T, D), draw(3, E, D)
    x[:, 0] = 3 + 0.5 * x[:, 0]
    logits = x @ w.T
    offset = shared_offset(x, logits, K)
    norms = (logits + (x @ offset)[:, None]).abs()
    assert ranked(norms) == ranked(logits)
    for row, other in zip(logits.numpy(), norms.numpy(), strict=True):
        first = numpy.argsort(-row)[:K]
        shift = other[first] - row[first]
        numpy.testing.assert_allclose(shift, shift[0], atol=1e-9)  # so the probs are equal too


@pytest.mark.parametrize("others", [0, 2])
def test_columns_rank_as_the_router(others):
    x, w = draw(2, T, D), draw(3, E, D)
    x[:, 0] = 3 + 0.5 * x[:, 0]
    columns = ranking_columns(x, w, K, 0.1 * draw(4, E, D, others))
    assert columns.shape == (E, D, 1 + others)
    norms = torch.stack([(x @ each).norm(dim=1) for each in columns], dim=1)
    pairs = zip(ranked(norms), ranked(x @ w.T), strict=True)
    same = sum(len(a & b) for a, b in pairs) / (K * T)
    assert same > 0.97


def test_norms_cannot_tell_x_from_its_opposite():
    """The limit of the method: one column cannot rank both a token and its opposite."""
    x, w = draw(2, T, D), draw(3, E, D)
    x = torch.cat([x, -x])
    columns = ranking_columns(x, w, 1, torch.zeros(E, D, 0).double())
    norms = (x @ columns[:, :, 0].T).abs()
    same = numpy.mean([a == b for a, b in zip(ranked(norms, 1), ranked(x @ w.T, 1), strict=True)])
    assert 1 / E < same <= 0.5
