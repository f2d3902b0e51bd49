"""A dense model as the start of a model of experts (sparse upcycling; Lory's dense warm-up).

Every expert starts as the feed-forward layer that it replaces. Routers and all other weights that
the dense model lacks stay random: if they were zero, all experts would always get equal gradients.
Megatron-Core stores a dense layer's matrices transposed, two of them in one weight:

    linear_fc1.weight [2F, D]: W_g, then W_p        linear_fc2.weight [D, F]: W_o

Experts with a complete W_g copy all three. If W_g = W_down W_up, as in AoE, W_p and W_o are copied
and W_g is factorized (`GateFactors`). If an expert is wider than the dense layer, the additional
columns start random, with zero rows in W_o, which leaves the output unchanged.

Shape suffixes: L experts in a part of a weight, D model width, F width of the dense layer, R
low-rank size, W width of an expert (F or more), A and B axes of any matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moe_parallel.config import Config
from moe_parallel.layers.system import system_of
from moe_parallel.model.initialization import named_generator


def change_by_upcycling(config: Config) -> str | None:
    """Why the experts' model computes something other than the dense one; None: it does not.

    The effects of rounding, and of a rank below the width, do not count here.
    """
    if config.moe.moe_expert_capacity_factor is not None:
        return "tokens over an expert's capacity lose part of their output"
    return system_of(config.selection).upcycling(config.selection)


@dataclass(frozen=True)
class DenseMatrix:
    """One matrix of a dense layer."""

    weight: str  # the weight that contains it
    half: int = 0  # the half of its rows, if it contains two matrices


W_G = DenseMatrix("linear_fc1.weight", 0)  # [F, D], as the next
W_P = DenseMatrix("linear_fc1.weight", 1)
W_O = DenseMatrix("linear_fc2.weight")  # [D, F]


@dataclass(frozen=True)
class Start:
    """How a part of an expert weight starts: `fill` computes it from a part of a dense matrix."""

    matrix: DenseMatrix
    rows: range  # of the matrix
    columns: range
    fill: Callable[[torch.Tensor], object]  # takes [rows, columns]


@dataclass(frozen=True)
class ExpertPart:
    """A part of a weight of all experts, or of its optimizer state."""

    values: torch.Tensor  # filled by `Start.fill`
    first: Sequence[int]  # index of their first element in the complete weight
    shape: Sequence[int]  # of the complete weight


@dataclass(frozen=True)
class DenseLayer:
    """The dense layer from which experts start."""

    hidden_size: int  # D
    width: int  # F
    gate: GateFactors


class GateFactors:
    """W_g = W_down W_up for every expert: one truncated SVD, with a different basis for each.

    With W_g = U S V^T, cut to R directions, and C = x U sqrt(S), any invertible M keeps the product
    (C M)(M^-1 sqrt(S) V^T), but not the norm ||C M|| by which AoE ranks experts. With the same M
    for all experts, their norms would be equal for every token. The same K experts would always be
    chosen, and no other expert would learn. Expert i uses M_i = Q_i diag(m): Q_i is a random
    rotation, and m is the same for all, from 1/2 to 2 and scaled to mean m^2 = 1. So each expert
    prefers other tokens, and no expert's norms are larger on average.
    """

    def __init__(self, seed: str) -> None:
        """`seed`: names the layer; an expert's rotation is derived from it and its number."""
        self._seed = seed
        self._roots: tuple[torch.Tensor, torch.Tensor] | None = None

    def down(self, w_g_FD: torch.Tensor, rank: int, expert: int) -> torch.Tensor:
        """W_down of an expert: fp32 [D, R]."""
        root_DR, _ = self._factorized(w_g_FD, rank)
        q_RR, m_R = self._frame(expert, root_DR)
        return (root_DR @ (q_RR * m_R)).float()

    def up(self, w_g_FD: torch.Tensor, rank: int, expert: int) -> torch.Tensor:
        """W_up of an expert: fp32 [R, F]."""
        _, root_RF = self._factorized(w_g_FD, rank)
        q_RR, m_R = self._frame(expert, root_RF)
        return ((q_RR / m_R).T @ root_RF).float()

    def _factorized(self, w_g_FD: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """U sqrt(S) [D, R] and sqrt(S) V^T [R, F] in fp64; zeros beyond the rank of W_g."""
        if self._roots is None:
            u_DX, s_X, v_XF = torch.linalg.svd(w_g_FD.double().T, full_matrices=False)
            kept = min(rank, len(s_X))
            root_R = s_X[:kept].sqrt()
            self._roots = (
                F.pad(u_DX[:, :kept] * root_R, (0, rank - kept)),
                F.pad(root_R[:, None] * v_XF[:kept], (0, 0, 0, rank - kept)),
            )
        return self._roots

    def _frame(self, expert: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Q_i [R, R] and m [R]."""
        assert self._roots is not None
        rank = len(self._roots[1])
        generator = named_generator(f"{self._seed} frame {expert}")
        normal_RR = torch.randn(rank, rank, generator=generator, dtype=torch.float64)
        m_R = torch.logspace(-1, 1, rank, base=2.0, dtype=torch.float64)
        m_R /= m_R.square().mean().sqrt()
        return torch.linalg.qr(normal_RR).Q.to(like), m_R.to(like)


#: Returns the parts to compute from dense matrices; a rule itself writes the zeros.
StartRule = Callable[[ExpertPart, DenseLayer], list[Start]]


def _copied(target_LAB: torch.Tensor, matrix: DenseMatrix, row: int, column: int) -> list[Start]:
    """Every expert starts as the transpose of a part of a matrix, which starts at (row, column)."""
    if not target_LAB.numel():
        return []
    _, a, b = target_LAB.shape
    rows, columns = range(row, row + b), range(column, column + a)
    return [Start(matrix, rows, columns, lambda part_BA: target_LAB.copy_(part_BA.T))]


def _w_gate_up(part: ExpertPart, dense: DenseLayer) -> list[Start]:
    """[E, D, 2, F]: W_g, then W_p."""
    _, d, half, f = part.first
    return [
        start
        for index, target_LDF in enumerate(part.values.unbind(2), start=half)
        for start in _copied(target_LDF, (W_G, W_P)[index], f, d)
    ]


def _w_p(part: ExpertPart, dense: DenseLayer) -> list[Start]:
    """[E, D, W]; columns beyond F stay random."""
    _, d, w = part.first
    return _copied(part.values[:, :, : max(0, dense.width - w)], W_P, w, d)


def _w_out(part: ExpertPart, dense: DenseLayer) -> list[Start]:
    """[E, W, D]; rows beyond F are zero."""
    _, w, d = part.first
    copied = max(0, dense.width - w)
    part.values[:, copied:].zero_()
    return _copied(part.values[:, :copied], W_O, d, w)


def _w_down(part: ExpertPart, dense: DenseLayer) -> list[Start]:
    """[E, D, R]."""
    expert, d, r = part.first
    _, rows, columns = part.values.shape

    def fill(w_g_FD: torch.Tensor) -> None:
        w_g_FD = w_g_FD.to(part.values.device)
        for number, values in enumerate(part.values, start=expert):
            whole_DR = dense.gate.down(w_g_FD, part.shape[2], number)
            values.copy_(whole_DR[d : d + rows, r : r + columns])

    return [Start(W_G, range(dense.width), range(dense.hidden_size), fill)]


def _w_up(part: ExpertPart, dense: DenseLayer) -> list[Start]:
    """[E, R, W]; columns beyond F stay random."""
    expert, r, w = part.first
    rows = part.values.shape[1]

    def fill(w_g_FD: torch.Tensor) -> None:
        w_g_FD = w_g_FD.to(part.values.device)
        for number, values in enumerate(part.values, start=expert):
            whole_RF = dense.gate.up(w_g_FD, part.shape[1], number)
            copied = whole_RF[r : r + rows, w : w + values.shape[1]]
            values[:, : copied.shape[1]].copy_(copied)

    return [Start(W_G, range(dense.width), range(dense.hidden_size), fill)]


#: How the weights of experts start, by their names without the shape suffix.
STARTS: dict[str, StartRule] = {
    "w_gate_up": _w_gate_up,
    "w_p": _w_p,
    "w_out": _w_out,
    "w_down": _w_down,
    "w_up": _w_up,
}
#: Factors of W_g, whose Adam moments start at zero: the moments of W_g do not apply to them.
FACTORS = ("w_down", "w_up")
