"""Segments whose tokens come one at a time, as a text is generated.

Shape suffixes: S tokens of a sequence, B sequences, X anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_parallel.selection.segments import segment_sums


@dataclass
class RunningSegments:
    """What later tokens need of the segments so far: `mean_BX`, which routes the next token.

    It is the mean of the last complete segment, or of the first one if `only_first`. Sequences may
    have different lengths, and segments of different lengths.
    """

    length_B: torch.Tensor  # int64: tokens of a segment (T_s)
    only_first: bool
    mean_BX: torch.Tensor  # fp32 or wider; zeros before a segment is complete
    complete_B: torch.Tensor  # bool: whether a segment is complete
    sum_BX: torch.Tensor  # of the segment in progress
    count_B: torch.Tensor  # int64: its tokens

    @classmethod
    def after(cls, x_SBX: torch.Tensor, length: int, only_first: bool) -> RunningSegments:
        """The state after the first S tokens of B sequences."""
        tokens, sequences = x_SBX.shape[:2]
        sums_GBX = segment_sums(x_SBX, length)
        full, rest = divmod(tokens, length)
        nothing_BX = torch.zeros_like(sums_GBX[0])
        last = 0 if only_first else full - 1
        counts = torch.full((3, sequences), length, device=x_SBX.device)
        counts[1:] = torch.tensor([[full], [rest]])
        return cls(
            counts[0],
            only_first,
            sums_GBX[last] / length if full else nothing_BX,
            counts[1] > 0,
            sums_GBX[full] if rest else nothing_BX,
            counts[2],
        )

    def add(self, x_BX: torch.Tensor) -> None:
        """The next token of each sequence."""
        self.sum_BX = self.sum_BX + x_BX
        self.count_B = self.count_B + 1
        ends_B = self.count_B == self.length_B
        takes_B = ends_B & ~self.complete_B if self.only_first else ends_B
        mean_BX = self.sum_BX / self.length_B[:, None]
        self.mean_BX = torch.where(takes_B[:, None], mean_BX, self.mean_BX)
        self.complete_B = self.complete_B | ends_B
        self.sum_BX = self.sum_BX.masked_fill(ends_B[:, None], 0)
        self.count_B = self.count_B.masked_fill(ends_B, 0)

    def rows(self, rows: torch.Tensor) -> RunningSegments:
        """The state of some of the sequences. `rows`: their numbers, int64."""
        return RunningSegments(
            self.length_B[rows],
            self.only_first,
            self.mean_BX[rows],
            self.complete_B[rows],
            self.sum_BX[rows],
            self.count_B[rows],
        )

    @staticmethod
    def joined(parts: Sequence[RunningSegments]) -> RunningSegments:
        """The states of several sets of sequences, one set after another."""
        return RunningSegments(
            torch.cat([part.length_B for part in parts]),
            parts[0].only_first,
            torch.cat([part.mean_BX for part in parts]),
            torch.cat([part.complete_B for part in parts]),
            torch.cat([part.sum_BX for part in parts]),
            torch.cat([part.count_B for part in parts]),
        )
