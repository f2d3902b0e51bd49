"""Expert-router coupling (ERC): a loss on the weights of a layer, whatever the tokens.

Lv et al. 2025, arXiv 2512.23447. The router's row R_i stands for the tokens of expert i. It should
excite its own expert most, and expert i should be excited most by its own row. The measure is
M_ij = ||R~_i W_g^j||_2, in which R~_i is R_i with multiplicative noise.

A rank has the columns j of M that belong to its experts. With expert-tensor parallelism it has a
part of each W_g^j, and the squares are summed over the ranks that share it.

Shape suffixes: E all experts, L experts of this rank, D model width, F expert width here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_parallel.parallel import Groups, gather_over, sum_over


class Coupling(NamedTuple):
    """The norms M of a layer."""

    norms_LE: torch.Tensor  # M_ij of this rank's experts j, for all rows i
    own_E: torch.Tensor  # M_ii of all experts
    first: int  # the number of this rank's first expert


def noise_bound(router_ED: torch.Tensor) -> torch.Tensor:
    """e_i = min_(j != i) ||R_i - R_j|| / (2 ||R_i||), and 0 for a row of zeros: [E].

    A row of which each number changes by at most this share stays nearer to itself than to the
    others.
    """
    distances_EE = torch.cdist(
        router_ED, router_ED, compute_mode="donot_use_mm_for_euclid_dist"
    ).fill_diagonal_(torch.inf)
    lengths_E = torch.linalg.vector_norm(router_ED, dim=1)
    bound_E = distances_EE.amin(dim=1) / (2 * lengths_E)
    return bound_E.where(lengths_E > 0, 0.0)


def with_noise(router_ED: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """R~_i = R_i * delta_i, with delta_i uniform in [1 - e_i, 1 + e_i]^D.

    The gradient does not pass through e.
    """
    bound_E1 = noise_bound(router_ED.detach())[:, None]
    uniform_ED = torch.rand(router_ED.shape, generator=noise, device=router_ED.device)
    return router_ED * (1 + bound_E1 * (2 * uniform_ED - 1))


def measured_coupling(rows_ED: torch.Tensor, w_g_LDF: torch.Tensor, groups: Groups) -> Coupling:
    """The norms of a layer, in the dtype of `rows_ED`. Collective over ep and etp.

    Args:
        rows_ED: R~, fp32 or fp64. Its gradient on a rank is that of the rank's part of W_g.
        w_g_LDF: W_g of this rank's experts. Products are in its dtype.
        groups: ep divides the experts, etp the width of each.
    """
    h_LEF = rows_ED.to(w_g_LDF.dtype) @ w_g_LDF
    squares_LE = sum_over(h_LEF.to(rows_ED.dtype).square().sum(dim=2), groups.etp)
    # The root of 0 has no finite gradient.
    norms_LE = squares_LE.where(squares_LE > 0, 1.0).sqrt() * (squares_LE > 0)
    here = len(norms_LE)
    first = groups.ep.rank() * here
    own_L = norms_LE[:, first : first + here].diagonal()
    return Coupling(norms_LE, gather_over(own_L, 0, groups.ep), first)


def coupling_loss(m: Coupling, alpha: float, groups: Groups) -> torch.Tensor:
    """1 / n^2 sum_(i != j) [max(M_ij - alpha M_ii, 0) + max(M_ij - alpha M_jj, 0)].

    It is the paper's loss with i and j exchanged in the second term, so that a rank needs only its
    own columns of M and the diagonal. It is 0 if alpha times each M_ii is at least every other
    entry of row and column i. The value is the sum over ep; a rank's gradient is that of its own
    columns.
    """
    own_L1 = m.own_E[m.first : m.first + len(m.norms_LE), None]
    above_LE = torch.relu(m.norms_LE - alpha * m.own_E) + torch.relu(m.norms_LE - alpha * own_L1)
    is_own_LE = torch.ones_like(above_LE, dtype=torch.bool).triu(m.first).tril(m.first)
    part = above_LE.masked_fill(is_own_LE, 0.0).sum() / len(m.own_E) ** 2
    return sum_over(part, groups.ep)
