"""The auxiliary losses that systems share: pure functions, and what a layer builds of options.

Each function of choices returns an fp32 scalar. A loss of one system stands beside its rule.

Under tensor and context parallelism ranks share a micro-batch, and T counts the tokens of one
rank. Every loss is the loss of the whole micro-batch, so it does not depend on the layout. The
gradient on each rank is that of its own tokens.

Expert-router coupling (ERC) is a loss on the weights of a layer, whatever the tokens (Lv et al.
2025, arXiv 2512.23447). The router's row R_i stands for the tokens of expert i. It should excite
its own expert most, and expert i should be excited most by its own row. The measure is M_ij =
||R~_i W_g^j||_2, in which R~_i is R_i with multiplicative noise. A rank has the columns j of M that
belong to its experts. With expert-tensor parallelism it has a part of each W_g^j, and the squares
are summed over the ranks that share it.

Shape suffixes: T tokens, B sequences, E all experts, L experts of this rank, D model width, F
expert width here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from moe_parallel.balancing.controller import Controller
from moe_parallel.balancing.load import StepLoad
from moe_parallel.config import Balancing, FixedChoices, FreeExperts, RoutedSelection, Selection
from moe_parallel.parallel import Groups, gather_over, sum_over
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.telemetry.metrics import loss_names, register_loss


def load_balancing_loss(choices: Choices, tokens: Tokens) -> torch.Tensor:
    """E * sum_i f_i P_i over the micro-batch (Switch Transformer, Eq. 4; AoE paper, Eq. 6).

    f_i: the share of the tokens that chose expert i, before choices are dropped, without gradient.
        The f_i sum to K, or to the mean number of experts per token.
    P_i: the mean probability of expert i.

    Uniform routing gives K.
    """
    num_experts = choices.scores_TE.shape[1]
    return num_experts * weighted_by_load(choices.probabilities_TE.sum(dim=0), choices, tokens)


def sequence_load_balancing_loss(choices: Choices, tokens: Tokens) -> torch.Tensor:
    """The mean over the sequences of the `load_balancing_loss` of each sequence.

    (DeepSeek-V3, Eq. 17 to 20, where f is divided by K; Huang et al. 2024, Eq. 8 to 10.)
    """
    num_tokens, num_experts = choices.scores_TE.shape
    length = num_tokens // tokens.num_sequences * tokens.num_shares
    # Sequence b has the bins b E .. (b+1) E - 1; the last bin is for empty slots.
    bins = tokens.num_sequences * num_experts
    sequence_T1 = torch.arange(num_tokens, device=choices.experts_TK.device)[:, None]
    sequence_T1 = sequence_T1 % tokens.num_sequences
    bins_TK = choices.experts_TK + sequence_T1 * num_experts
    bins_TK = bins_TK.masked_fill(choices.experts_TK < 0, bins).flatten()
    counts = torch.zeros(bins + 1, device=bins_TK.device)
    counts.scatter_add_(0, bins_TK, torch.ones_like(bins_TK, dtype=counts.dtype))
    counts_BE = counts[:-1].view(tokens.num_sequences, num_experts)
    mass_BE = choices.probabilities_TE.view(-1, tokens.num_sequences, num_experts).sum(dim=0)
    share_BE, mean_BE = tokens.sum(torch.stack([counts_BE, mass_BE])) / length
    return num_experts * torch.sum(share_BE * mean_BE) / tokens.num_sequences


def global_load_balancing_loss(
    choices: Choices, tokens: Tokens, share_E: torch.Tensor
) -> torch.Tensor:
    """`load_balancing_loss` with f from another, larger set of tokens.

    Args:
        share_E: fp32; f, the share of the tokens of that set that chose each expert.
    """
    num_tokens, num_experts = choices.scores_TE.shape
    mean_E = tokens.sum(choices.probabilities_TE.sum(dim=0))
    mean_E = mean_E / (num_tokens * tokens.num_shares)
    return num_experts * torch.sum(share_E * mean_E)


def importance_loss(choices: Choices, tokens: Tokens) -> torch.Tensor:
    """(std / mean)^2, over the experts, of each one's sum of probs (Shazeer 2017, Eq. 6 and 7).

    The variance is that of a population. 1e-10 keeps the quotient finite if all probs are 0.
    """
    importance_E = tokens.sum(choices.probs_per_expert())
    variance = importance_E.var(unbiased=False)
    return variance / (importance_E.mean().square() + 1e-10)


def z_loss(choices: Choices, tokens: Tokens) -> torch.Tensor:
    """mean_t logsumexp(logits_t)^2 over the tokens t of the micro-batch (ST-MoE, Eq. 5).

    Zero logits give (ln E)^2.
    """
    total = torch.logsumexp(choices.scores_TE, dim=1).square().sum()
    return tokens.sum(total) / (len(choices.scores_TE) * tokens.num_shares)


def weighted_by_load(sums_E: torch.Tensor, choices: Choices, tokens: Tokens) -> torch.Tensor:
    """sum_i f_i m_i, with f_i the share of the tokens that chose expert i.

    Args:
        sums_E: m_i times the number of tokens, summed over this rank's tokens.
    """
    sums_2E = torch.stack([choices.tokens_per_expert(), sums_E])
    share_E, mean_E = tokens.sum(sums_2E) / (len(choices.scores_TE) * tokens.num_shares)
    return torch.sum(share_E * mean_E)


LossOfChoices = Callable[[Choices, Tokens], torch.Tensor]


@dataclass(frozen=True)
class RoutingLoss:
    """An auxiliary loss on the routing of a micro-batch, and its coefficient.

    With a controller, its setting multiplies the coefficient.
    """

    name: str  # in metrics.jsonl
    coefficient: float
    of: LossOfChoices
    controller: Controller | None = None
    through_all: bool = True  # whether scores of experts that are not chosen have a gradient

    def __post_init__(self) -> None:
        if self.name not in loss_names():
            raise ValueError(
                f"no auxiliary loss is called {self.name!r}: call {register_loss.__module__}."
                f"register_loss({self.name!r}) where the system is registered"
            )

    def weighted(self, value: torch.Tensor) -> torch.Tensor:
        """The part of the total loss that a value of this loss adds."""
        part = self.coefficient * value
        return part if self.controller is None else self.controller.setting * part


class LossContext(NamedTuple):
    """What a loss may use besides the options of its system."""

    num_moe_layers: int  # of the whole model
    load: StepLoad | None = None  # of the latest step; None: see `Selection.uses_step_load`
    controller: Controller | None = None  # None: see `Selection.controlled`
    layer: Any = None  # the layer that will compute the loss; its weights exist by then


#: Takes the options of a system.
MakeLoss = Callable[[Any, LossContext], RoutingLoss]


def load_balancing(selection: Balancing, context: LossContext) -> RoutingLoss:
    """alpha * n * sum f_i P_i, over the scope that --moe-router-load-balancing-type selects.

    With free experts it is alpha * (n + Z) * sum eta_i f_i P_i, with eta_i = tau for those.
    --moe-aux-loss-per-choice divides alpha by MoE layers * K.
    """
    scope = selection.moe_router_load_balancing_type
    loss: LossOfChoices = load_balancing_loss
    if scope == "seq_aux_loss":
        loss = sequence_load_balancing_loss
    elif scope == "global_aux_loss" and context.load is not None:
        loss = partial(_of_the_step_before, context.load)
    if isinstance(selection, FreeExperts) and selection.free_experts:
        loss = partial(_weighing_free, loss, selection.free_experts, selection.moe_free_expert_tau)
    share = 1.0
    if isinstance(selection, FixedChoices) and selection.moe_aux_loss_per_choice:
        share = context.num_moe_layers * selection.moe_router_topk
    return RoutingLoss("load_balancing_loss", selection.moe_aux_loss_coeff / share, loss)


def importance(selection: Balancing, context: LossContext) -> RoutingLoss:
    """(std / mean)^2, over the experts, of each expert's sum of probs."""
    return RoutingLoss("importance_loss", selection.moe_importance_loss_coeff, importance_loss)


def z(selection: RoutedSelection, context: LossContext) -> RoutingLoss:
    """mean(logsumexp(router logits)^2)."""
    return RoutingLoss("z_loss", selection.moe_z_loss_coeff, z_loss)


def coupling(selection: RoutedSelection, context: LossContext) -> RoutingLoss:
    """ERC: couples router and experts. It is a loss on the weights, whatever the tokens are."""
    groups = context.layer.context.groups
    # A loss on tokens leaves a part of its gradient on each rank of a micro-batch, tp x cp, and
    # Megatron-Core adds up the parts. This one leaves a part on each rank of etp x ep.
    share = groups.etp_ep.size() / groups.tp_cp.size()
    coefficient = share * selection.moe_erc_loss_coeff
    return RoutingLoss("erc_loss", coefficient, context.layer.coupling_loss)


def _of_the_step_before(load: StepLoad, choices: Choices, tokens: Tokens) -> torch.Tensor:
    """The loss with f of the previous global batch; 0 in the first step, which has none."""
    return global_load_balancing_loss(choices, tokens, load.share_E)


def _weighing_free(
    loss: LossOfChoices, num_free: int, tau: float, choices: Choices, tokens: Tokens
) -> torch.Tensor:
    """A load-balancing loss whose terms of the free experts count tau (MoE++).

    At its balance, eta_i f_i is equal for all i. MoE++ leaves out the factor n + Z.
    """
    eta_E = torch.ones_like(choices.probabilities_TE[0])
    eta_E[-num_free:] = tau
    return loss(replace(choices, probabilities_TE=choices.probabilities_TE * eta_E), tokens)


#: The losses that options bring with them.
_LOSSES: dict[type[Selection], tuple[MakeLoss, ...]] = {
    Balancing: (load_balancing, importance),
    RoutedSelection: (z, coupling),
}


def losses_of(kind: type[Selection]) -> tuple[MakeLoss, ...]:
    """The losses that the options of a system bring, in the order in which they are added."""
    return tuple(make for base, its in _LOSSES.items() if issubclass(kind, base) for make in its)


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
