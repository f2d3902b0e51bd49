"""The cutoffs of expert threshold routing: a number per expert that a score must exceed.

A cutoff c is kept as a bias b = -c, because a rule adds it to the scores and compares with 0. Like
every balancing bias it is the same on every rank and in every layout, and changes only between
steps. A step selects with the cutoffs of the step before.

Shape suffixes: T tokens of this rank, A tokens of a micro-batch, E experts.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.distributed as dist

from moe_parallel.balancing.bias import ExpertBias
from moe_parallel.balancing.quantile import StepMean, exceeded_by_share
from moe_parallel.selection.tokens import Tokens


class ExpertCutoffs(ExpertBias):
    """The cutoffs of a layer's experts. A subclass moves them."""

    observes = True

    def __init__(self, num_experts: int, start: float, mean_choices: float, rate: float) -> None:
        """
        Args:
            start: the cutoff of all experts until the first step ends.
            mean_choices: K; an expert is to compute K / n of the tokens.
            rate: how fast the cutoffs move.
        """
        super().__init__(num_experts, rate)
        self.bias_E.fill_(-start)
        self.mean_choices = mean_choices

    @property
    def cutoff_E(self) -> torch.Tensor:
        """fp32 [E]."""
        return -self.bias_E


class QuantileCutoffs(ExpertCutoffs):
    """Each cutoff is a running mean of the number that K / n of the tokens' scores exceed.

    q_i is the mean of that number over the micro-batches of a step (`exceeded_by_share`). The
    running mean keeps the share beta in a step (arXiv 2603.11535), and `start` does not count:
    w <- beta w + 1 - beta and c <- c + (1 - beta) / w (q - c), which is raw / (1 - beta^t) for
    raw <- beta raw + (1 - beta) q. `weight_1`, fp32, is w and is saved with the model.
    """

    weight_1: torch.Tensor

    def __init__(self, num_experts: int, start: float, mean_choices: float, ema: float) -> None:
        """`ema`: beta."""
        super().__init__(num_experts, start, mean_choices, rate=1 - ema)
        self.register_buffer("weight_1", torch.zeros(1))
        self.quantiles = StepMean(num_experts)

    @torch.no_grad()
    def observe(self, ranked_TE: torch.Tensor, choices_per_token: int, tokens: Tokens) -> None:
        ranked_AE = tokens.of_micro_batch(ranked_TE).double()
        if len(ranked_AE) > 1:  # nothing is between the scores of one token
            self.quantiles.add(exceeded_by_share(ranked_AE, self.mean_choices))

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor, group: dist.ProcessGroup) -> None:
        quantile_E, number = self.quantiles.finish(group)
        # Not by `if`, because the host would wait for the device.
        new = self.update_rate * (number > 0).double()
        weight_1 = (1 - new) * self.weight_1.double() + new
        share_1 = new / weight_1.where(weight_1 > 0, 1)
        self.bias_E.copy_(self.bias_E - share_1 * (quantile_E + self.bias_E))
        self.weight_1.copy_(weight_1)


class SignCutoffs(ExpertCutoffs):
    """c_i += u * sign(load of i - K / n of the tokens) (J. Su, kexue.fm/archives/11626)."""

    tokens_1: torch.Tensor

    def __init__(self, num_experts: int, start: float, mean_choices: float, rate: float) -> None:
        """`rate`: u."""
        super().__init__(num_experts, start, mean_choices, rate)
        tokens_1 = torch.zeros(1, dtype=torch.float64)  # of this step, on this rank
        self.register_buffer("tokens_1", tokens_1, persistent=False)

    @torch.no_grad()
    def observe(self, ranked_TE: torch.Tensor, choices_per_token: int, tokens: Tokens) -> None:
        self.tokens_1 += len(ranked_TE)

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor, group: dist.ProcessGroup) -> None:
        if group.size() > 1:
            dist.all_reduce(self.tokens_1, group=group)
        # Whole numbers, so that a load that is right leaves its cutoff, also for K = 2.3.
        k, of = Fraction(str(self.mean_choices)).as_integer_ratio()
        lacks_E = k * self.tokens_1 - of * len(counts_E) * counts_E
        self.bias_E += self.update_rate * torch.sign(lacks_E).to(self.bias_E.dtype)
        self.tokens_1.zero_()
