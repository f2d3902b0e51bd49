"""The ids of the tokens, on their way from the model to its layers of experts.

Megatron-Core hands an argument `context` from the model through all layers, also when it computes
them again. In a model with an encoder it is the encoder's output; here it is free.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from moe_parallel.layers import ExpertLayer

CONTEXT = "context"


class TransformerLayerWithIds(TransformerLayer):
    """A transformer layer whose experts get the ids of the tokens, int64 [B, S]."""

    def forward(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, Any]:
        assert isinstance(self.mlp, ExpertLayer)
        self.mlp.token_ids_BS = named[CONTEXT]
        output: tuple[torch.Tensor, Any] = super().forward(*arguments, **named)
        return output
