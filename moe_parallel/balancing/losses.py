"""The auxiliary losses, as pure functions. Each returns an fp32 scalar.

Under tensor and context parallelism ranks share a micro-batch, and T counts the tokens of one
rank. Every loss is the loss of the whole micro-batch, so it does not depend on the layout. The
gradient on each rank is that of its own tokens.

Shape suffixes: T tokens, E experts, B sequences.
"""

from __future__ import annotations

import torch

from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens


def load_balancing_loss(choices: Choices, tokens: Tokens) -> torch.Tensor:
    """E * sum_i f_i P_i over the micro-batch (Switch Transformer, Eq. 4; AoE paper, Eq. 6).

    f_i: the share of the tokens that chose expert i, before choices are dropped, without gradient.
        The f_i sum to K, or to the mean number of experts per token.
    P_i: the mean probability of expert i.

    Uniform routing gives K.
    """
    num_experts = choices.scores_TE.shape[1]
    return num_experts * _weighted_by_load(choices.probabilities_TE.sum(dim=0), choices, tokens)


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


def l1_loss(choices: Choices, tokens: Tokens, target: float) -> torch.Tensor:
    """mean_t sum_i f_i g_ti over the micro-batch (ReMoE, arXiv 2412.14711).

    f_i: E / target * the share of the tokens that chose expert i, without gradient; 1 if an equal
        load has `target` choices per token. It pushes harder on experts with a high load.
    g_ti: the prob of expert i, not negative; 0 if it was not chosen.
    """
    num_experts = choices.scores_TE.shape[1]
    return num_experts / target * _weighted_by_load(choices.probs_per_expert(), choices, tokens)


def entropy_loss(choices: Choices, tokens: Tokens) -> torch.Tensor:
    """The dynamic loss: mean entropy of the probabilities, in nats (Huang et al. 2024, Eq. 7).

    Without it, dynamic routing could become less certain and so choose more experts.
    """
    # A probability that underflows to 0 adds 0. Without the clamp its gradient would be infinite.
    p_TE = choices.probabilities_TE
    total = -(p_TE * p_TE.clamp(min=torch.finfo(p_TE.dtype).tiny).log()).sum()
    return tokens.sum(total) / (len(choices.scores_TE) * tokens.num_shares)


def routing_free_loss(choices: Choices, tokens: Tokens, expert_share: float) -> torch.Tensor:
    """mu L_EB + (1 - mu) L_TB over the micro-batch (Routing-Free MoE, arXiv 2604.00801).

    L_EB = mean_i (mean_t f_ti) (mean_t G_ti) and L_TB = mean_t (mean_i f_ti) (mean_i G_ti), with
        f_ti: 1 if token t chose expert i, without gradient; G_ti: the value then, and 0 otherwise.
    `expert_share`: mu.
    """
    assert choices.values_TE is not None
    num_tokens, num_experts = choices.scores_TE.shape
    f_TE = choices.chosen()
    g_TE = choices.values_TE * f_TE
    experts = _weighted_by_load(g_TE.sum(dim=0), choices, tokens) / num_experts
    both = tokens.sum((f_TE.mean(dim=1) * g_TE.mean(dim=1)).sum())
    return expert_share * experts + (1 - expert_share) * both / (num_tokens * tokens.num_shares)


def _weighted_by_load(sums_E: torch.Tensor, choices: Choices, tokens: Tokens) -> torch.Tensor:
    """sum_i f_i m_i, with f_i the share of the tokens that chose expert i.

    Args:
        sums_E: m_i times the number of tokens, summed over this rank's tokens.
    """
    sums_2E = torch.stack([choices.tokens_per_expert(), sums_E])
    share_E, mean_E = tokens.sum(sums_2E) / (len(choices.scores_TE) * tokens.num_shares)
    return torch.sum(share_E * mean_E)
