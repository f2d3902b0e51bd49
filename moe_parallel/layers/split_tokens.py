"""The tokens of a rank that shares a micro-batch with the other tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from moe_parallel.parallel import sum_gradient_over, sum_over
from moe_parallel.selection.tokens import Tokens


@dataclass(frozen=True)
class SplitTokens(Tokens):
    """A stretch of every sequence. The methods are those of `Tokens` and collective over `tp`."""

    tp: dist.ProcessGroup  # rank i holds the i-th stretch of each sequence

    @property
    def num_stretches(self) -> int:
        return self.tp.size()

    def first_position(self, num_tokens: int) -> int:
        return self.tp.rank() * (num_tokens // self.num_sequences)

    def of_micro_batch(self, x_TX: torch.Tensor) -> torch.Tensor:
        if self.tp.size() == 1:
            return x_TX.detach()
        return gather_from_sequence_parallel_region(x_TX.detach(), group=self.tp)

    def of_this_rank(self, x_AX: torch.Tensor) -> torch.Tensor:
        return x_AX.chunk(self.tp.size())[self.tp.rank()]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return sum_over(x, self.tp)

    def sum_for_each(self, x: torch.Tensor) -> torch.Tensor:
        return sum_gradient_over(sum_over(x, self.tp), self.tp)
