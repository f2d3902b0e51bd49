"""Converts W_g of a routed layer to W_down and W_up of an autonomous layer.

Shape suffixes: E experts, D model width, F expert width, R low-rank size (d_low), J ranking
columns, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_parallel.convert.factors import Factors, factorize
from moe_parallel.convert.ranking import cross_entropy, fitted_scales, ranking_columns
from moe_parallel.selection.choices import greatest

# Added to the diagonal of the Gram matrix, relative to its mean diagonal, so that it has a root.
RIDGE = 1e-4
# Initial length of the ranking columns after the first, which start as singular vectors.
START = 0.3


@dataclass(frozen=True)
class GateOptions:
    """How W_g is factorized, and how its norms are fitted."""

    rank: int
    weighted: bool = True  # SVD in the measure of the activations; False: the plain SVD
    ranking_columns: int = 4  # columns fitted to the router; 0: a scale for each expert
    condition: float = 20.0  # with ranking columns: the largest ratio of their gains to the others'


@dataclass(frozen=True)
class ConvertedGate:
    """The factors of W_g, fp64, and what was chosen on the calibration tokens."""

    factors: Factors
    ranking: str  # "columns", "scales" (of each expert), or "none": one scale for all
    condition: float  # the largest ratio of the gains of two columns of an expert
    before: Factors  # the plain result of the SVD: columns and rows share the singular values


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

    There are several ways to rank. Considered are those that choose the router's first K experts
    at least as often as the plain result of the SVD. Of these, the function uses the one whose
    softmax of norms is closest to the router's probabilities on these tokens.
    """
    w_gate_EDF, x_TD, w_ED = w_gate_EDF.double(), x_TD.double(), w_router_ED.double()
    w_ED = w_ED - w_ED.mean(0)  # ranking and softmax stay the same, and norms may be smaller
    logits_TE = x_TD @ w_ED.T
    root_DD = _root(x_TD) if options.weighted else torch.eye(x_TD.shape[1]).to(x_TD)
    plain, values_ER = factorize(w_gate_EDF, options.rank, root_DD)
    # Where W_g has no energy, a gain must still be larger than 0, because rows are divided by it.
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
    best = losses[min(losses)]  # never empty: one scale for all is always among them
    return ConvertedGate(best.factors, best.ranking, best.condition, before)


def share_of_choices(scores_TE: torch.Tensor, others_TE: torch.Tensor, k: int) -> float:
    """The share of the K experts with the largest scores that the other scores choose too."""
    first_TK, second_TK = (greatest(scores, k) for scores in (scores_TE, others_TE))
    return float((first_TK[:, :, None] == second_TK[:, None, :]).any(2).double().mean())


def _around(
    leading_EDJ: torch.Tensor, w_gate_EDF: torch.Tensor, root_DD: torch.Tensor, options: GateOptions
) -> _Candidate:
    """W_g with `leading` as the first columns. The others are so short that they hardly change the
    norms."""
    factors, gains_ER = factorize(w_gate_EDF, options.rank, root_DD, leading_EDJ)
    shortest_E1 = gains_ER[:, :1] / options.condition
    gains_ER = torch.maximum(gains_ER, shortest_E1)
    gains_ER[:, leading_EDJ.shape[2] :] = shortest_E1
    return _Candidate("columns", factors.with_gains(gains_ER), gains_ER)


def _root(x_TD: torch.Tensor) -> torch.Tensor:
    """The upper triangular root with root^T root = mean x^T x + a small diagonal: [D, D]."""
    gram_DD = x_TD.T @ x_TD / len(x_TD)
    gram_DD.diagonal().add_(RIDGE * gram_DD.diagonal().mean())
    return torch.linalg.cholesky(gram_DD).mT
