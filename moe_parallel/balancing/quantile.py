"""Quantiles of a micro-batch, and their mean over the micro-batches of a step.

A quantile of a step would need the values of all its tokens at once. The mean of the quantiles of
its micro-batches does not, and is the same in every layout, because the micro-batches are.

Shape suffixes: A tokens of a micro-batch, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_parallel.balancing.load import keeping_dtypes


def midpoint(values: torch.Tensor, k: int, dim: int) -> torch.Tensor:
    """Halfway between the k-th and the (k+1)-th largest value along `dim`, which is kept."""
    return values.topk(k + 1, dim=dim).values.narrow(dim, k - 1, 2).mean(dim=dim, keepdim=True)


def exceeded_by_share(values_AE: torch.Tensor, k: float) -> torch.Tensor:
    """For each expert, a number that A k / E of its A >= 2 values exceed, rounded down: [E].

    At least one value exceeds it and at least one does not.
    """
    num_tokens, num_experts = values_AE.shape
    # Fractions are exact: 100 * 2.3 / 10 is 23, but slightly less in floating point.
    share = math.floor(num_tokens * Fraction(str(k)) / num_experts)
    share = min(max(share, 1), num_tokens - 1)
    return midpoint(values_AE, share, dim=0)[0]


class StepMean(nn.Module):
    """The mean of a number per expert over the micro-batches of a step, on all ranks."""

    sums: torch.Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        # The sum of the numbers of this step's micro-batches, then the number of these.
        sums = torch.zeros(num_experts + 1, dtype=torch.float64)
        self.register_buffer("sums", sums, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return keeping_dtypes(self, fn, super()._apply)

    def add(self, values_E: torch.Tensor) -> None:
        """Adds one micro-batch on this rank."""
        self.sums[:-1] += values_E
        self.sums[-1] += 1

    def finish(self, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Ends the step. Collective. Returns the mean, fp64 [E], and the number that it is of."""
        if group.size() > 1:
            dist.all_reduce(self.sums, group=group)
        number = self.sums[-1].clone()
        mean_E = self.sums[:-1] / number.clamp(min=1)
        self.sums.zero_()
        return mean_E, number
