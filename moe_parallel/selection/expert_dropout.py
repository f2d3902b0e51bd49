"""Experts that are left out of a merge by chance."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertDropout:
    """Each expert left out with a probability (SMEAR); where none is left, all stay.

    Shape suffixes: G merges of a sequence, B sequences, E experts.
    """

    probability: float

    def __call__(self, e_GBE: torch.Tensor) -> torch.Tensor:
        """The weights of a merge, which sum to 1 again: [G, B, E]."""
        if not self.probability:
            return e_GBE
        # The device's default generator is the same on all tensor-parallel ranks, which must agree.
        kept_GBE = e_GBE * (torch.rand_like(e_GBE) >= self.probability)
        sums_GB1 = kept_GBE.sum(-1, keepdim=True)
        some_GB1 = sums_GB1 > 0
        return torch.where(some_GB1, kept_GBE / sums_GB1.where(some_GB1, 1), e_GBE)
