"""Fits norms that rank the experts as a router did.

AoE ranks by p_i = ||x W_down^i||, and W_g^i = W_down^i W_up^i determines W_down^i only up to an
invertible matrix. So columns that rank well can be found first, and W_g is factorized around them.

A vector u may be added to all rows of a router: the logits x (w_i + u) have the same ranking and
the same softmax. Where they are positive, a single column w_i + u for each expert has the right
norms, |x (w_i + u)|. But a norm is the same for x and -x. If no u makes all logits positive,
further columns are needed, which are found by descent.

Shape suffixes: T tokens, E experts, D model width, J columns, K choices per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_parallel.convert.factors import norms

# Weight of the mean square of the norms in both fits. It keeps them from growing without need.
SMALLNESS = 1e-4
# How far the fit lifts the logits above the level that the ranking needs.
MARGIN = 2.0


def cross_entropy(scores_TE: torch.Tensor, logits_TE: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of softmax(scores) with softmax(logits), mean over tokens. It is smallest
    if they differ by a constant per token; then ranking and probs are equal."""
    target_TE = torch.softmax(logits_TE, dim=1)
    return -(target_TE * torch.log_softmax(scores_TE, dim=1)).sum(1).mean()


def fitted_scales(norms_TE: torch.Tensor, logits_TE: torch.Tensor, *, each: bool) -> torch.Tensor:
    """The c_E > 0 for which softmax(c norms) is closest to softmax(logits).

    `each`: one number per expert; otherwise one for all, which changes the probs but no ranking.
    """
    start = (logits_TE.std() / norms_TE.std().clamp(min=1e-12)).clamp(1e-3, 1e3).log()
    log_c = _minimized(
        lambda log_c: cross_entropy(norms_TE * log_c.exp(), logits_TE),
        start.repeat(norms_TE.shape[1] if each else 1),
    )
    return log_c.exp().expand(norms_TE.shape[1])


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
