"""The tokens of a rank that shares a micro-batch with other tensor- or context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from moe_parallel.parallel import gather_over, sum_gradient_over, sum_over
from moe_parallel.selection.shares import Share, in_order, part_of, take, zigzag
from moe_parallel.selection.tokens import Tokens


@dataclass(frozen=True)
class SplitTokens(Tokens):
    """A share of every sequence. The methods are those of `Tokens` and collective over `ranks`."""

    ranks: dist.ProcessGroup  # tensor- and context-parallel; the number in tp varies fastest
    cp_size: int = field(default=1, kw_only=True)  # context-parallel ranks among them

    @property
    def num_shares(self) -> int:
        return self.ranks.size()

    @property
    def num_stretches(self) -> int:
        return self.ranks.size() // self.cp_size

    def share(self, num_tokens: int) -> Share:
        length = num_tokens // self.num_sequences * self.num_shares
        return self._share_of(self.ranks.rank(), length)

    def of_micro_batch(self, x_TX: torch.Tensor) -> torch.Tensor:
        if self.num_shares == 1:
            return x_TX.detach()
        together = gather_over(x_TX.detach(), 0, self.ranks)
        if self.cp_size == 1:
            return together
        length = len(together) // self.num_sequences
        shares = [self._share_of(rank, length) for rank in range(self.num_shares)]
        return in_order(self._by_position(together), shares).flatten(0, 1)

    def of_this_rank(self, x_AX: torch.Tensor) -> torch.Tensor:
        share = self._share_of(self.ranks.rank(), len(x_AX) // self.num_sequences)
        return take(self._by_position(x_AX), share).flatten(0, 1)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return sum_over(x, self.ranks)

    def sum_for_each(self, x: torch.Tensor) -> torch.Tensor:
        return sum_gradient_over(sum_over(x, self.ranks), self.ranks)

    def _share_of(self, rank: int, length: int) -> Share:
        of_cp, of_tp = divmod(rank, self.num_stretches)
        return part_of(zigzag(length, self.cp_size, of_cp), self.num_stretches, of_tp)

    def _by_position(self, x: torch.Tensor) -> torch.Tensor:
        """[S * B, ...] -> [S, B, ...]."""
        return x.unflatten(0, (-1, self.num_sequences))
