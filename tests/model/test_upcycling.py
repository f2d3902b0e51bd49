"""Dense matrices as experts: each part of a weight is correct; the factorization of W_g."""

import itertools

import numpy
import pytest
import torch

from moe_parallel.model.upcycling import STARTS, DenseLayer, ExpertPart, GateFactors

E, D, F, R, W = 3, 6, 8, 4, 11
SHAPES = {
    "w_gate_up": (E, D, 2, F),
    "w_out": (E, W, D),
    "w_p": (E, D, W),
    "w_down": (E, D, R),
    "w_up": (E, R, W),
}
BEFORE = 7.0  # the content of a weight before it is filled
W_G, W_P, W_O = (torch.randn(shape, generator=torch.Generator().manual_seed(seed))
                 for seed, shape in enumerate(((F, D), (F, D), (D, F))))  # fmt: skip
MATRICES = {("linear_fc1.weight", 0): W_G, ("linear_fc1.weight", 1): W_P}
MATRICES |= {("linear_fc2.weight", 0): W_O}


def _part(name, box):
    """A part of an initial weight; `box`: a slice for each axis."""
    values = torch.full([axis.stop - axis.start for axis in box], BEFORE)
    part = ExpertPart(values, [axis.start for axis in box], SHAPES[name])
    for start in STARTS[name](part, DenseLayer(D, F, GateFactors("a layer"))):
        matrix = MATRICES[start.matrix.weight, start.matrix.half]
        rows, columns = (slice(axis.start, axis.stop) for axis in (start.rows, start.columns))
        assert rows.stop <= matrix.shape[0] and columns.stop <= matrix.shape[1]
        start.fill(matrix[rows, columns])
    return values


def _whole(name):
    return _part(name, [slice(0, size) for size in SHAPES[name]])


def test_every_expert_copies():
    for expert in range(E):
        gate_up, w_p, w_out = (_whole(name)[expert] for name in ("w_gate_up", "w_p", "w_out"))
        for d, f in itertools.product(range(D), range(F)):
            assert gate_up[d, 0, f] == W_G[f, d]
            assert gate_up[d, 1, f] == w_p[d, f] == W_P[f, d]
            assert w_out[f, d] == W_O[d, f]
        assert (w_p[:, F:] == BEFORE).all()
        assert (w_out[F:] == 0).all()


@pytest.mark.parametrize("name", SHAPES)
def test_a_part_is_that_part_of_the_whole(name):
    whole = _whole(name)
    cuts = [[slice(0, 1), slice(size // 2, size), slice(0, size)] for size in SHAPES[name]]
    for box in itertools.product(*cuts):
        assert torch.equal(_part(name, box), whole[box]), box


def test_a_part_beyond_the_dense_width_needs_nothing():
    beyond = slice(F, W)
    assert (_part("w_p", (slice(0, E), slice(0, D), beyond)) == BEFORE).all()
    assert (_part("w_up", (slice(0, E), slice(0, R), beyond)) == BEFORE).all()
    assert (_part("w_out", (slice(0, E), beyond, slice(0, D))) == 0).all()


@pytest.mark.parametrize("rank", [1, 4, D, D + 3])
def test_factors_multiply_to_the_best_of_their_rank(rank):
    u, s, v = numpy.linalg.svd(W_G.T.double().numpy(), full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ v[:rank]
    gate = GateFactors("a layer")
    for expert in range(E):
        down, up = (of(W_G, rank, expert).numpy() for of in (gate.down, gate.up))
        assert down.shape == (D, rank) and up.shape == (rank, F)
        numpy.testing.assert_allclose(down @ up, best, atol=1e-5)


def test_frames_follow_from_the_layer_and_the_expert():
    def down(layer, expert):
        return GateFactors(layer).down(W_G, R, expert)

    assert torch.equal(down("a", 1), down("a", 1))
    assert not torch.allclose(down("a", 1), down("a", 2))
    assert not torch.allclose(down("a", 1), down("b", 1))
