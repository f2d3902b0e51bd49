"""Products of rank R: compared with numpy's SVD, in both measures, and with given columns."""

import numpy
import pytest
import torch

from moe_parallel.convert.gate import factorize

E, D, F = 3, 6, 9


def matrices(seed=0, shape=(E, D, F)):
    return torch.from_numpy(numpy.random.default_rng(seed).normal(size=shape))


def activations(tokens=200, seed=1):
    """Activations that are strongly correlated and have a nonzero mean."""
    rng = numpy.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(tokens, D)) @ rng.normal(size=(D, D)) + 1.0)


def root_of(x):
    return torch.linalg.cholesky(x.T @ x / len(x)).mT


@pytest.mark.parametrize("rank", [1, 4])
def test_weighted_loses_as_little_of_x_w_as_any_product_can(rank):
    """The smallest error over all matrices of rank R is that of the SVD of x W itself."""
    w, x = matrices(), activations()
    factors, _ = factorize(w, rank, root_of(x))
    lost = 0.0
    for each in w.numpy():
        values = numpy.linalg.svd(x.numpy() @ each, compute_uv=False)
        lost += (values[rank:] ** 2).sum()
    whole = sum(((x.numpy() @ each) ** 2).sum() for each in w.numpy())
    assert factors.error(w, x) == pytest.approx((lost / whole) ** 0.5, rel=1e-9)
    plain, _ = factorize(w, rank, torch.eye(D).double())
    assert factors.error(w, x) < 0.98 * plain.error(w, x)


def test_gains_of_given_columns_give_their_norms():
    w, x = matrices(), activations()
    leading = matrices(5, (E, D, 2))
    factors, gains = factorize(w, 2, root_of(x), leading)
    found = factors.with_gains(gains).norms(x)
    for e in range(E):
        expected = numpy.linalg.norm(x.numpy() @ leading[e].numpy(), axis=1)
        numpy.testing.assert_allclose(found[:, e], expected, rtol=1e-8)
