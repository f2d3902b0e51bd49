"""The loads of a layer's experts in a step, and the balancing bias for the next step.

Both are the same on every rank and in every layout, because they are computed from sums over a
global batch and change only between steps. The routing of a micro-batch therefore does not depend
on the other micro-batches of its step.

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
        return _keeping_dtypes(self, fn, super()._apply)

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


class ExpertBias(nn.Module):
    """Loss-free balancing (Wang et al. 2024): b_i += u * sign(mean load - load of i).

    `bias_E`, fp32, is saved with the model. It is added to the values by which experts are ranked,
    and affects neither probs nor gradients.
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
        """Updates the bias from the number of choices per expert in a step, in fp64 [E].

        The sum of the counts is compared with E times each count, which is exact. A mean would be
        rounded, and the bias would drift even if the load were equal.
        """
        lacks_E = counts_E.sum() - len(counts_E) * counts_E
        self.bias_E += self.update_rate * torch.sign(lacks_E).to(self.bias_E.dtype)


def _keeping_dtypes(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], apply: Any
) -> Any:
    """Moves buffers to the module's device but keeps their dtype: bf16 would lose small steps."""
    before = dict(module.named_buffers(recurse=False))
    applied = apply(fn)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dtype != before[name].dtype:
            module._buffers[name] = before[name].to(buffer.device)
    return applied
