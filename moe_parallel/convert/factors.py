"""Factorizes a matrix of every expert into a product of two thin matrices.

Shape suffixes: E experts, D model width, F expert width, R low-rank size (d_low), J leading
columns, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Factors:
    """W ~ columns @ rows for each expert.

    Column r may be multiplied by any number and row r divided by it. The product stays the same;
    the norms of x @ columns change.
    """

    columns_EDR: torch.Tensor
    rows_ERF: torch.Tensor

    def with_gains(self, gains_ER: torch.Tensor) -> Factors:
        """The same product with column r multiplied by gains[:, r], and row r divided by it."""
        return Factors(
            self.columns_EDR * gains_ER[:, None, :], self.rows_ERF / gains_ER[:, :, None]
        )

    def norms(self, x_TD: torch.Tensor) -> torch.Tensor:
        """||x @ columns||_2 by expert: [T, E]."""
        return norms(x_TD, self.columns_EDR)

    def error(self, w_EDF: torch.Tensor, x_TD: torch.Tensor) -> float:
        """||x W - x columns rows|| / ||x W|| (Frobenius, over tokens and experts together)."""
        wrong, right = 0.0, 0.0
        for w_DF, c_DR, r_RF in zip(w_EDF, self.columns_EDR, self.rows_ERF, strict=True):
            exact_TF = x_TD @ w_DF
            wrong += float((exact_TF - x_TD @ c_DR @ r_RF).square().sum())
            right += float(exact_TF.square().sum())
        return (wrong / right) ** 0.5


def norms(x_TD: torch.Tensor, columns_EDR: torch.Tensor) -> torch.Tensor:
    """||x @ columns_e||_2 by expert: [T, E]."""
    num_experts, _, rank = columns_EDR.shape
    z_TER = (x_TD @ columns_EDR.transpose(0, 1).flatten(1)).unflatten(1, (num_experts, rank))
    return z_TER.norm(dim=2)


def factorize(
    w_EDF: torch.Tensor,
    rank: int,
    root_DD: torch.Tensor,
    leading_EDJ: torch.Tensor | None = None,
) -> tuple[Factors, torch.Tensor]:
    """The best product of rank R for each expert: the truncated SVD, in a measure of x.

    If `root` is a root of the Gram matrix of activations, mean x^T x = root^T root, then
    columns @ rows minimizes the mean of ||x W - x columns rows||^2. It is the truncated SVD of
    root W, whose left factor is then divided by root. If `root` is the identity, it minimizes
    ||W - columns rows||_F. The left singular vectors are computed as eigenvectors of
    (root W)(root W)^T, which is D x D for any expert width.

    Args:
        w_EDF: the matrices, fp64.
        rank: R, 1 <= R <= D.
        root_DD: upper triangular, fp64.
        leading_EDJ: matrices whose span the first J < R columns must have; the other columns are
            the best besides them. None: all columns are free, in falling order of singular value.

    Returns the factors, and the singular value of each column, [E, R]. The columns are orthonormal
    in the measure of x (uncorrelated over the tokens, with mean square 1). The singular values are
    those of root W. For the first J columns they are those of root leading: with these as gains,
    ||x columns_J|| = ||x leading||.
    """
    bases, values = [], []
    for e, w_DF in enumerate(w_EDF):
        leading_DJ = w_DF[:, :0] if leading_EDJ is None else leading_EDJ[e]
        basis_DR, values_R = _basis(root_DD @ w_DF, rank, root_DD @ leading_DJ)
        bases.append(basis_DR)
        values.append(values_R)
    basis_EDR = torch.stack(bases)
    columns_EDR = torch.linalg.solve_triangular(
        root_DD.expand(len(w_EDF), -1, -1), basis_EDR, upper=True
    )
    return Factors(columns_EDR, basis_EDR.mT @ (root_DD @ w_EDF)), torch.stack(values)


def _basis(
    y_DF: torch.Tensor, rank: int, leading_DJ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """R orthonormal vectors. The first J span `leading`; the others have the most energy of y."""
    first_DJ, lengths_J, _ = torch.linalg.svd(leading_DJ, full_matrices=False)
    beside_DD = torch.eye(len(y_DF), dtype=y_DF.dtype, device=y_DF.device) - first_DJ @ first_DJ.T
    energy_DD = beside_DD @ (y_DF @ y_DF.T) @ beside_DD
    # Moves these eigenvalues below all others, so that no eigenvector of a space without energy
    # has a part of them.
    energy_DD -= energy_DD.trace() * (first_DJ @ first_DJ.T)
    energies_D, vectors_DD = torch.linalg.eigh(energy_DD)
    others = slice(0, rank - len(lengths_J))
    values_D = energies_D.flip(0).clamp(min=0).sqrt()
    return (
        torch.cat([first_DJ, vectors_DD.flip(1)[:, others]], dim=1),
        torch.cat([lengths_J, values_D[others]]),
    )
