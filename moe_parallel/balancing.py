"""Auxiliary losses that shape routing: pure functions, no state.

Shape suffixes: T tokens, E experts. Under tensor parallelism the T tokens of a micro-batch are
split over the `tp` group; every loss here is the loss of the whole micro-batch, so that it does not
depend on the layout. Micro-batches of other data-parallel ranks are not mixed in: the scope is the
micro-batch ("batch" in the papers).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_parallel.parallel import sum_over
from moe_parallel.selection.choices import Choices


def load_balancing_loss(choices: Choices, tp: dist.ProcessGroup) -> torch.Tensor:
    """E * sum_i f_i P_i over the micro-batch (Switch Transformer, Eq. 4; AoE paper, Eq. 6).

    f_i: share of the tokens that chose expert i, before any dropping, without gradient (the f_i
    sum to K); P_i: mean of softmax over all E scores. Uniform routing gives K; it is fp32, 0-d.
    The gradient on each rank is that of its own tokens.
    """
    num_tokens, num_experts = choices.scores_TE.shape
    probabilities_TE = torch.softmax(choices.scores_TE, dim=1)
    sums_2E = torch.stack([choices.tokens_per_expert(), probabilities_TE.sum(dim=0)])
    sums_2E = sum_over(sums_2E, tp)
    share_E, mean_E = sums_2E / (num_tokens * tp.size())
    return num_experts * torch.sum(share_E * mean_E)


def z_loss(logits_TE: torch.Tensor, tp: dist.ProcessGroup) -> torch.Tensor:
    """mean_t logsumexp(logits_t)^2 over the micro-batch (ST-MoE, Eq. 5); fp32, 0-d.

    Zero logits give (ln E)^2.
    """
    total = torch.logsumexp(logits_TE, dim=1).square().sum()
    total = sum_over(total, tp)
    return total / (logits_TE.shape[0] * tp.size())
