"""Factorizes W_g of a routed layer into W_down W_up, with norms that rank as the router did.

AoE ranks by p_i = ||x W_down^i||, and W_g^i = W_down^i W_up^i determines W_down^i only up to an
invertible matrix. So columns that rank well can be found first, and W_g is factorized around them.

A vector u may be added to all rows of a router: the logits x (w_i + u) have the same ranking and
the same softmax. Where they are positive, a single column w_i + u for each expert has the right
norms, |x (w_i + u)|. But a norm is the same for x and -x. If no u makes all logits positive,
further columns are needed, which are found by descent.

Shape suffixes: E experts, D model width, F expert width, R low-rank size (d_low), J ranking
columns, T tokens, K choices per token.
"""

from __future__ import annotations

from collections.abc import Callable
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
    w_EDF: torch.Tensor, rank: int, root_DD: torch.Tensor, leading_EDJ: torch.Tensor | None = None
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


# Weight of the mean square of the norms in the fit. It keeps them from growing without need.
SMALLNESS = 1e-4
# How far the fit lifts the logits above the level that the ranking needs.
MARGIN = 2.0


def cross_entropy(scores_TE: torch.Tensor, logits_TE: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of softmax(scores) with softmax(logits), mean over tokens. It is smallest
    if they differ by a constant per token; then ranking and probs are equal."""
    target_TE = torch.softmax(logits_TE, dim=1)
    return -(target_TE * torch.log_softmax(scores_TE, dim=1)).sum(1).mean()


def ranking_columns(
    x_TD: torch.Tensor, w_ED: torch.Tensor, k: int, others_EDJ: torch.Tensor
) -> torch.Tensor:
    """Columns whose norms are close to the logits x w_i, up to a constant per token.

    Args:
        x_TD: activations, fp64.
        w_ED: the router.
        k: choices per token; the first guess ranks only these.
        others_EDJ: initial values of the second, third, ... column.

    Returns [E, D, 1 + J].
    """
    logits_TE = x_TD @ w_ED.T
    first_ED = w_ED + shared_offset(x_TD, logits_TE, k)
    start_EDJ = torch.cat([first_ED[:, :, None], others_EDJ], dim=2)

    def misfit(columns_EDJ: torch.Tensor) -> torch.Tensor:
        norms_TE = norms(x_TD, columns_EDJ)
        return cross_entropy(norms_TE, logits_TE) + SMALLNESS * norms_TE.square().mean()

    return _minimized(misfit, start_EDJ)


def shared_offset(x_TD: torch.Tensor, logits_TE: torch.Tensor, k: int) -> torch.Tensor:
    """The smallest u [D] for which |logits + x u| ranks the first K experts of each token as the
    logits do, and gives them the same probs.

    This is true if x u > -(logit_K + logit_min) / 2: then logit_K + x u is positive, and no logit
    is so negative that its absolute value is larger. The fit aims at MARGIN above this bound and
    penalizes the square of what is missing, which is a convex problem. It has a solution if all
    activations are positive along some direction, as they mostly are after an RMSNorm.
    """
    kth_T = torch.topk(logits_TE, k, dim=1).values[:, -1]
    needed_T = MARGIN - (kth_T + logits_TE.amin(1)) / 2

    def lack(u_D: torch.Tensor) -> torch.Tensor:
        offset_T = x_TD @ u_D
        return (needed_T - offset_T).relu().square().mean() + SMALLNESS * offset_T.square().mean()

    return _minimized(lack, torch.zeros(x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device))


def _minimized(
    function: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor
) -> torch.Tensor:
    """The argument near `start` at which `function` is smallest, by L-BFGS."""
    argument = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([argument], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = function(argument)
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    return argument.detach()


# Added to the diagonal of the Gram matrix, relative to its mean diagonal, so that it has a root.
RIDGE = 1e-4
# Initial length of the ranking columns after the first, which start as singular vectors.
START = 0.3
# The most columns that are fitted to the router.
RANKING_COLUMNS = 4
# The largest ratio of the first column's gain to the others'. A higher one ranks better, a lower
# one keeps W_up smaller.
CONDITION = 20.0


def convert_gate(
    w_gate_EDF: torch.Tensor, w_router_ED: torch.Tensor, x_TD: torch.Tensor, k: int, rank: int
) -> tuple[Factors, Factors]:
    """Factors of W_g, fp64, whose norms rank the experts as a softmax router does on the tokens x.

    Returns them after those of the plain SVD, whose columns and rows share the singular values.
    """
    w_gate_EDF, x_TD, w_ED = w_gate_EDF.double(), x_TD.double(), w_router_ED.double()
    w_ED = w_ED - w_ED.mean(0)  # ranking and softmax stay the same, and norms may be smaller
    root_DD = _root(x_TD)
    plain, values_ER = factorize(w_gate_EDF, rank, root_DD)
    # Where W_g has no energy, a gain must still be larger than 0, because rows are divided by it.
    before = plain.with_gains(values_ER.clamp(min=1e-6 * float(values_ER.max())).sqrt())
    others_EDJ = START * plain.columns_EDR[:, :, : min(RANKING_COLUMNS, rank) - 1]
    leading_EDJ = ranking_columns(x_TD, w_ED, k, others_EDJ)
    factors, gains_ER = factorize(w_gate_EDF, rank, root_DD, leading_EDJ)
    # The columns beside them are so short that they hardly change the norms.
    shortest_E1 = gains_ER[:, :1] / CONDITION
    gains_ER = torch.maximum(gains_ER, shortest_E1)
    gains_ER[:, leading_EDJ.shape[2] :] = shortest_E1
    return before, factors.with_gains(gains_ER)


def _root(x_TD: torch.Tensor) -> torch.Tensor:
    """The upper triangular root with root^T root = mean x^T x + a small diagonal: [D, D]."""
    gram_DD = x_TD.T @ x_TD / len(x_TD)
    gram_DD.diagonal().add_(RIDGE * gram_DD.diagonal().mean())
    return torch.linalg.cholesky(gram_DD).mT
