"""W_g of a routed layer as the W_down and W_up of an autonomous one.

Shape suffixes: E experts, D model width, F expert width, R low-rank size (d_low), J ranking
columns, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_parallel.convert.factors import Factors, factorize
from moe_parallel.convert.ranking import cross_entropy, fitted_scales, ranking_columns

# Added to the Gram matrix, as a share of its mean diagonal, so that it has a root.
RIDGE = 1e-4
# With which ranking columns but the first start, as a multiple of singular vectors of unit length.
START = 0.3


@dataclass(frozen=True)
class GateOptions:
    """How W_g is factorized, and what its norms are made of."""

    rank: int
    weighted: bool = True  # SVD in the measure of the activations; else the plain one
    ranking_columns: int = 4  # columns fitted to the router; 0: a scale for each expert
    condition: float = 20.0  # with them: the first outweighs the others at most so many times


@dataclass(frozen=True)
class ConvertedGate:
    """W_g as factors, fp64, and what the calibration tokens have decided."""

    factors: Factors
    ranking: str  # "columns", "scales" (of each expert), or "none": one scale for all
    condition: float  # the greatest gain of an expert's column over another's
    before: Factors  # the SVD as it falls: columns and rows share the singular values


@dataclass(frozen=True)
class _Candidate:
    ranking: str
    factors: Factors
    gains_ER: torch.Tensor

    @property
    def condition(self) -> float:
        return float((self.gains_ER.amax(1) / self.gains_ER.amin(1)).max())


def convert_gate(
    w_gate_EDF: torch.Tensor,
    w_router_ED: torch.Tensor,
    x_TD: torch.Tensor,
    k: int,
    options: GateOptions,
) -> ConvertedGate:
    """Factors of W_g whose norms rank the experts as a softmax router does on the tokens x.

    Of the ways to rank, the one is taken whose softmax of norms comes closest to the router's
    probabilities on these tokens, among those that choose the router's first K experts no less
    often than the SVD as it falls.
    """
    w_gate_EDF, x_TD, w_ED = w_gate_EDF.double(), x_TD.double(), w_router_ED.double()
    w_ED = w_ED - w_ED.mean(0)  # neither ranking nor softmax feels it, and norms may be smaller
    logits_TE = x_TD @ w_ED.T
    root_DD = _root(x_TD) if options.weighted else torch.eye(x_TD.shape[1]).to(x_TD)
    plain, values_ER = factorize(w_gate_EDF, options.rank, root_DD)
    # Where W_g holds nothing, a gain must still be a divisor.
    shares_ER = values_ER.clamp(min=1e-6 * float(values_ER.max())).sqrt()
    before = plain.with_gains(shares_ER)
    norms_TE = before.norms(x_TD)
    candidates = []
    for ranking, each in (("none", False), ("scales", True)):
        gains_ER = shares_ER * fitted_scales(norms_TE, logits_TE, each=each)[:, None]
        candidates.append(_Candidate(ranking, plain.with_gains(gains_ER), gains_ER))
    if options.ranking_columns:
        others_EDJ = START * plain.columns_EDR[:, :, : options.ranking_columns - 1]
        leading_EDJ = ranking_columns(x_TD, w_ED, k, others_EDJ)
        candidates.append(_around(leading_EDJ, w_gate_EDF, root_DD, options))

    least = share_of_choices(logits_TE, norms_TE, k)
    losses: dict[float, _Candidate] = {}
    for each_candidate in candidates:
        norms_TE = each_candidate.factors.norms(x_TD)
        if share_of_choices(logits_TE, norms_TE, k) >= least:
            losses[float(cross_entropy(norms_TE, logits_TE))] = each_candidate
    best = losses[min(losses)]  # one scale for all is always among them
    return ConvertedGate(best.factors, best.ranking, best.condition, before)


def share_of_choices(scores_TE: torch.Tensor, others_TE: torch.Tensor, k: int) -> float:
    """Of the K experts of greatest score, the share that the other scores choose too."""
    first_TK, second_TK = (scores.topk(k, dim=1).indices for scores in (scores_TE, others_TE))
    return float((first_TK[:, :, None] == second_TK[:, None, :]).any(2).double().mean())


def _around(
    leading_EDJ: torch.Tensor, w_gate_EDF: torch.Tensor, root_DD: torch.Tensor, options: GateOptions
) -> _Candidate:
    """W_g with `leading` as the first columns, the others so short that norms hardly feel them."""
    factors, gains_ER = factorize(w_gate_EDF, options.rank, root_DD, leading_EDJ)
    shortest_E1 = gains_ER[:, :1] / options.condition
    gains_ER = torch.maximum(gains_ER, shortest_E1)
    gains_ER[:, leading_EDJ.shape[2] :] = shortest_E1
    return _Candidate("columns", factors.with_gains(gains_ER), gains_ER)


def _root(x_TD: torch.Tensor) -> torch.Tensor:
    """Upper triangular, with root^T root = mean x^T x and a little on the diagonal: [D, D]."""
    gram_DD = x_TD.T @ x_TD / len(x_TD)
    gram_DD.diagonal().add_(RIDGE * gram_DD.diagonal().mean())
    return torch.linalg.cholesky(gram_DD).mT
