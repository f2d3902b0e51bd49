"""Expert dropout: a merge leaves out experts at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertDropout:
    """Each expert is left out with a given probability (SMEAR). If none would remain, all stay.

    Shape suffixes: G merges of a sequence, B sequences, E experts.
    """

    probability: float

    def __call__(self, e_GBE: torch.Tensor, uniform_GBE: torch.Tensor | None) -> torch.Tensor:
        """The merge weights after dropout, normalized to sum to 1: [G, B, E].

        `uniform_GBE`: random numbers of [0, 1), equal on the ranks that share a sequence; None if
            the probability is 0.
        """
        if not self.probability:
            return e_GBE
        assert uniform_GBE is not None
        kept_GBE = e_GBE * (uniform_GBE >= self.probability)
        sums_GB1 = kept_GBE.sum(-1, keepdim=True)
        some_GB1 = sums_GB1 > 0
        return torch.where(some_GB1, kept_GBE / sums_GB1.where(some_GB1, 1), e_GBE)
