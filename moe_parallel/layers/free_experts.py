"""Zero-computation experts, which a token may choose in place of an expert with matrices.

MoE++ (arXiv 2410.07348) has zero experts (0), copy experts (x) and constant experts, a_1 x + a_2 v
with (a_1, a_2) = softmax(W_c x) and a learned v. LongCat-Flash (arXiv 2509.01322) has copies alone.
Their columns of the scores follow those of the n experts, in this order. Every rank
holds all of them and computes their outputs for its own tokens, so no token is sent to them.

Shape suffixes: T tokens of this rank, D model width, K choices per token, Z free experts, C
constant experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_parallel.config import FreeExperts, Selection
from moe_parallel.layers.expert_layer import ExpertLayer
from moe_parallel.ops.fp32_linear import fp32_linear
from moe_parallel.selection.choices import Choices


class LayerFreeExperts:
    """The free experts of a layer, which has their weights: w_constant_CAD [C, 2, D], v_CD."""

    def __init__(self, layer: ExpertLayer, selection: FreeExperts) -> None:
        self._layer = layer
        self.number = selection.free_experts
        self._copies = slice(
            selection.moe_zero_experts, self.number - selection.moe_constant_experts
        )
        self._constants = slice(self._copies.stop, self.number)
        if selection.moe_constant_experts:
            constants, d = selection.moe_constant_experts, layer.config.hidden_size
            layer.add_replicated_weight("w_constant_CAD", constants, 2, d)
            layer.add_replicated_weight("v_CD", constants, d)
            layer.v_CD.init_std = 1.0  # type: ignore[assignment,union-attr]  # as in the authors' code

    def divided(self, choices: Choices) -> tuple[Choices, torch.Tensor]:
        """The choices of the n experts, and the probs of the free ones: [T, Z], 0 if not chosen.

        A slot with a free expert becomes empty.
        """
        experts_TK, first = choices.experts_TK, self._layer.num_experts
        free_TK = experts_TK - first + 1  # from 1; 0 collects all others
        probs_TZ = choices.probs_TK.new_zeros(len(experts_TK), 1 + self.number)
        probs_TZ = probs_TZ.scatter_add(1, free_TK.clamp(min=0), choices.probs_TK)[:, 1:]
        computed_TK = experts_TK.masked_fill(free_TK > 0, -1)
        return replace(choices, experts_TK=computed_TK, all_chosen=False), probs_TZ

    def output(self, x_TD: torch.Tensor, probs_TZ: torch.Tensor) -> torch.Tensor:
        """The sum of prob * output over the free experts: [T, D]."""
        share_T = probs_TZ[:, self._copies].sum(1)  # of x in the sum
        if self._constants.start == self._constants.stop:
            return (x_TD * share_T[:, None]).to(x_TD.dtype)
        w_CAD, v_CD = (
            self._layer.replicated(getattr(self._layer, name))
            for name in ("w_constant_CAD", "v_CD")
        )
        logits_TCA = fp32_linear(x_TD, w_CAD.flatten(0, 1)).unflatten(1, w_CAD.shape[:2])
        probs_TC = probs_TZ[:, self._constants]
        of_x_TC, of_v_TC = (probs_TC[:, :, None] * logits_TCA.softmax(-1)).unbind(-1)
        share_T = share_T + of_x_TC.sum(1)
        constant_TD = of_v_TC.to(v_CD.dtype) @ v_CD
        return (x_TD * share_T[:, None] + constant_TD).to(x_TD.dtype)


def build_free_experts(layer: ExpertLayer, selection: Selection) -> LayerFreeExperts | None:
    """The free experts that the options of a system ask for. None: there are none."""
    if not isinstance(selection, FreeExperts) or not selection.free_experts:
        return None
    return LayerFreeExperts(layer, selection)
