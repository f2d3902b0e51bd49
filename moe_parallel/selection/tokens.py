"""Where the tokens that a rank routes stand in their micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


@dataclass(frozen=True)
class Tokens:
    """The T tokens of a rank: a stretch of every sequence, in the order [S, B] of Megatron.

    Shape suffixes: T tokens of this rank, A tokens of the whole micro-batch.
    """

    num_sequences: int  # B
    tp: dist.ProcessGroup  # its ranks hold the stretches of the same sequences, in order

    def of_micro_batch(self, x_TX: torch.Tensor) -> torch.Tensor:
        """Rows of every rank in the order [S, B]: [A, X]. No gradient."""
        if self.tp.size() == 1:
            return x_TX.detach()
        return gather_from_sequence_parallel_region(x_TX.detach(), group=self.tp)

    def of_this_rank(self, x_AX: torch.Tensor) -> torch.Tensor:
        """This rank's part of rows of the whole micro-batch: [T, X]."""
        return x_AX.chunk(self.tp.size())[self.tp.rank()]

    def first_position(self, num_tokens: int) -> int:
        """Where in its sequence this rank's stretch begins. `num_tokens`: T."""
        return self.tp.rank() * (num_tokens // self.num_sequences)
