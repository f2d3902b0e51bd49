"""smear: the mean of a sequence gives its merge weights (Muqeeth et al. 2023); not causal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moe_parallel.layers import MergedLayer, Rules, System, register
from moe_parallel.layers.system import keeps_output
from moe_parallel.parallel import uniform_like
from moe_parallel.selection.segments import Merges
from moe_parallel.systems.smear import SmearSelection


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


class SmearLayer(MergedLayer):
    """SMEAR: the mean of a sequence gives the merge weights for all its tokens. Not causal."""

    def merges(self, x_SBD: torch.Tensor) -> Merges:
        mean_1BD, tokens = self.segment_means(x_SBD, None)
        e_1BE, dropout = self.weights(mean_1BD), self.current_rule()
        uniform_1BE = None
        if dropout.probability:
            uniform_1BE = uniform_like(e_1BE, self.context.groups, shared=True)
        return self.of_this_rank(Merges([tokens], dropout(e_1BE, uniform_1BE)), tokens)

    def logits(self, r: torch.Tensor) -> torch.Tensor:
        """LN(r) LN(w_i) / sqrt(D): both have a variance of 1, so the logits start near N(0, 1)."""
        width = r.shape[-1:]
        w_ED = F.layer_norm(self.router_weight(r.dtype), width)
        return F.linear(F.layer_norm(r, width), w_ED) / math.sqrt(width[0])


def rules(selection: SmearSelection) -> Rules:
    return Rules(ExpertDropout(selection.smear_expert_dropout), ExpertDropout(0))


SMEAR = register(System(SmearSelection, layer=SmearLayer, rules=rules, upcycling=keeps_output))
