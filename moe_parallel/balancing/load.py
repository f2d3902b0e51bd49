"""What the experts of a layer were chosen for in a step, and what follows from it for the next.

Both are the same on every rank and in every layout: they are made of the sums over a global batch,
and change only between steps. So routing in a step depends on nothing that other micro-batches of
the step did.

Shape suffix: E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_parallel.selection.choices import Choices


class StepLoad(nn.Module):
    """Counts the choices of a step over all its micro-batches and ranks.

    `share_E`, fp32, is saved with the model: of the tokens of the latest whole step, the share that
    chose each expert; 0 everywhere before the first.
    """

    share_E: torch.Tensor
    counts: torch.Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.register_buffer("share_E", torch.zeros(num_experts))
        # Choices of each expert in this step, then tokens.
        counts = torch.zeros(num_experts + 1, dtype=torch.float64)
        self.register_buffer("counts", counts, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return _keeping_dtypes(self, fn, super()._apply)

    @torch.no_grad()
    def count(self, choices: Choices) -> None:
        """Adds the choices of one micro-batch of this rank."""
        self.counts[:-1] += choices.tokens_per_expert()
        self.counts[-1] += len(choices.scores_TE)

    @torch.no_grad()
    def finish(self, group: dist.ProcessGroup) -> torch.Tensor:
        """Ends the step: sets `share_E`. Collective over the ranks that route tokens here.

        Returns how many tokens of the step chose each expert: whole numbers in fp64 [E].
        """
        if group.size() > 1:
            dist.all_reduce(self.counts, group=group)
        counts_E = self.counts[:-1].clone()
        self.share_E.copy_(counts_E / self.counts[-1].clamp(min=1))
        self.counts.zero_()
        return counts_E


class ExpertBias(nn.Module):
    """Loss-free balancing (Wang et al. 2024): b_i += u * sign(mean load - load of i).

    `bias_E`, fp32, is saved with the model. It is added to what experts are ranked by, and no gate
    or gradient knows of it.
    """

    bias_E: torch.Tensor

    def __init__(self, num_experts: int, update_rate: float) -> None:
        super().__init__()
        self.update_rate = update_rate
        self.register_buffer("bias_E", torch.zeros(num_experts))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return _keeping_dtypes(self, fn, super()._apply)

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor) -> None:
        """Moves the bias by the choices of a step, whole numbers in fp64 [E].

        Their sum is compared with E times each, which is exact: a mean is not, and a bias would
        drift where experts are loaded evenly.
        """
        lacks_E = counts_E.sum() - len(counts_E) * counts_E
        self.bias_E += self.update_rate * torch.sign(lacks_E).to(self.bias_E.dtype)


def _keeping_dtypes(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], apply: Any
) -> Any:
    """Buffers go with the module to a device, but not to bf16, which would lose small steps."""
    before = dict(module.named_buffers(recurse=False))
    applied = apply(fn)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dtype != before[name].dtype:
            module._buffers[name] = before[name].to(buffer.device)
    return applied
