"""The loads of a layer's experts in a step.

They are the same on every rank and in every layout, because they are sums over a global batch, and
they change only between steps. The routing of a micro-batch therefore does not depend on the other
micro-batches of its step.

Shape suffix: E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_parallel.selection.choices import Choices


class StepLoad(nn.Module):
    """Counts the choices of a step over all its micro-batches and ranks.

    `share_E`, fp32, is saved with the model. It is the share of the tokens of the latest complete
    step that chose each expert; all 0 before the first step ends.
    """

    share_E: torch.Tensor
    counts: torch.Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.register_buffer("share_E", torch.zeros(num_experts))
        # The number of choices of each expert in this step, then the number of tokens.
        counts = torch.zeros(num_experts + 1, dtype=torch.float64)
        self.register_buffer("counts", counts, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return keeping_dtypes(self, fn, super()._apply)

    @torch.no_grad()
    def count(self, choices: Choices) -> None:
        """Adds the choices of one micro-batch on this rank."""
        self.counts[:-1] += choices.tokens_per_expert()
        self.counts[-1] += len(choices.scores_TE)

    @torch.no_grad()
    def finish(self, group: dist.ProcessGroup) -> torch.Tensor:
        """Ends the step and sets `share_E`. Collective over the ranks that route in this layer.

        Returns the number of tokens of the step that chose each expert: whole numbers in fp64 [E].
        """
        if group.size() > 1:
            dist.all_reduce(self.counts, group=group)
        counts_E = self.counts[:-1].clone()
        self.share_E.copy_(counts_E / self.counts[-1].clamp(min=1))
        self.counts.zero_()
        return counts_E


def keeping_dtypes(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], apply: Any
) -> Any:
    """Moves buffers to the module's device but keeps their dtype: bf16 would lose small steps."""
    before = dict(module.named_buffers(recurse=False))
    applied = apply(fn)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dtype != before[name].dtype:
            module._buffers[name] = before[name].to(buffer.device)
    return applied


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
