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
from moe_parallel.selection.rules import FreeChoices


class LayerFreeExperts:
    """The free experts of a layer, which has their weights: w_constant_CAD [C, 2, D], v_CD."""

    def __init__(self, layer: ExpertLayer, selection: FreeExperts) -> None:
        self._layer = layer
        self.number = selection.free_experts
        zero, copy, constants = selection.free_kinds
        self._choices = FreeChoices(layer.num_experts, zero, copy, constants)
        if constants:
            d = layer.config.hidden_size
            layer.add_replicated_weight("w_constant_CAD", constants, 2, d)
            layer.add_replicated_weight("v_CD", constants, d)
            layer.v_CD.init_std = 1.0  # type: ignore[assignment,union-attr]  # as in the authors' code

    def divided(self, choices: Choices) -> tuple[Choices, torch.Tensor]:
        """The choices of the n experts, and the probs of the free ones: [T, Z], 0 if not chosen.

        A slot with a free expert becomes empty.
        """
        free_TK, probs_TZ = self._choices.divided(choices.experts_TK, choices.probs_TK)
        computed_TK = choices.experts_TK.masked_fill(free_TK, -1)
        return replace(choices, experts_TK=computed_TK, all_chosen=False), probs_TZ

    def output(self, x_TD: torch.Tensor, probs_TZ: torch.Tensor) -> torch.Tensor:
        """The sum of prob * output over the free experts: [T, D]."""
        if not self._choices.constant:
            return self._choices.output(x_TD, probs_TZ, None, None)
        w_CAD, v_CD = (
            self._layer.replicated(getattr(self._layer, name))
            for name in ("w_constant_CAD", "v_CD")
        )
        logits_TCA = fp32_linear(x_TD, w_CAD.flatten(0, 1)).unflatten(1, w_CAD.shape[:2])
        return self._choices.output(x_TD, probs_TZ, logits_TCA, v_CD)


def build_free_experts(layer: ExpertLayer, selection: Selection) -> LayerFreeExperts | None:
    """The free experts that the options of a system ask for. None: there are none."""
    if not isinstance(selection, FreeExperts) or not selection.free_experts:
        return None
    return LayerFreeExperts(layer, selection)
