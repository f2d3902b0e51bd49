"""Where the tokens to route stand in their micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tokens:
    """The T tokens that a rank routes, in the order [S, B] of Megatron: here, all of them.

    `layers.split_tokens` holds those of a rank that has a stretch of every sequence. What a rule or
    a loss needs of the other ranks it asks these methods for, so that it is a pure function itself.

    Shape suffixes: T tokens of this rank, A tokens of the whole micro-batch.
    """

    num_sequences: int  # B

    @property
    def num_stretches(self) -> int:
        """Into how many stretches of equal length every sequence is split."""
        return 1

    def first_position(self, num_tokens: int) -> int:
        """Where in its sequence this rank's stretch begins. `num_tokens`: T."""
        return 0

    def of_micro_batch(self, x_TX: torch.Tensor) -> torch.Tensor:
        """Rows of every rank in the order [S, B]: [A, X]. No gradient."""
        return x_TX.detach()

    def of_this_rank(self, x_AX: torch.Tensor) -> torch.Tensor:
        """This rank's part of rows of the whole micro-batch: [T, X]."""
        return x_AX

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, for what all ranks then compute alike, a loss.

        The gradient of each rank's x is that of the sum.
        """
        return x

    def sum_for_each(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, which each rank then uses for tokens of its own.

        The gradient of each rank's x is the sum of those that the ranks give the sum.
        """
        return x
