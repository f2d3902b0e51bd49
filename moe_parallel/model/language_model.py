"""Megatron-Core's GPTModel with a loss that never holds the logits of a micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from moe_parallel.experts.experts import AddsToMainGradients
from moe_parallel.experts.fp8 import Fp8Engine
from moe_parallel.model.linear_cross_entropy import linear_cross_entropy
from moe_parallel.model.token_ids import CONTEXT
from moe_parallel.ops import Ops

_CHUNK_OF_LOSSES = 1024  # tokens, where --loss-chunk-size is 0


class LanguageModel(AddsToMainGradients, GPTModel):
    """With labels it returns the losses, otherwise the logits, as GPTModel does.

    Training also needs `loss_mask`, [B, S]: the loss that is minimized must be a multiple of the
    masked sum of the losses. Without it, every token counts.

    `vocab_size_of_losses`: entries of the vocabulary from this number on have probability 0 in the
    losses. None, as in training: the entries that pad the vocabulary take part.
    """

    vocab_size_of_losses: int | None = None

    def __init__(
        self, ops: Ops, loss_chunk_size: int, passes_token_ids: bool = False, **arguments: Any
    ) -> None:
        """
        Args:
            ops: the operators.
            loss_chunk_size: tokens whose logits exist at a time; 0: GPTModel's own loss.
            passes_token_ids: to the layers, on every pipeline stage.
            arguments: of GPTModel.
        """
        super().__init__(**arguments)
        self.ops = ops
        self.loss_chunk_size = loss_chunk_size
        self.passes_token_ids = passes_token_ids

    def forward(self, input_ids: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if self.passes_token_ids:
            named["extra_block_kwargs"] = {CONTEXT: input_ids}
        output: torch.Tensor = super().forward(input_ids, *arguments, **named)
        return output

    def _postprocess(  # the part of GPTModel.forward that follows the decoder
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        loss_mask: torch.Tensor | None = None,
        **named: Any,
    ) -> torch.Tensor:
        chunk_size = self.loss_chunk_size
        if self.vocab_size_of_losses is not None:  # GPTModel's own loss does not know it
            chunk_size = chunk_size or _CHUNK_OF_LOSSES
        if labels is None or not (self.post_process and chunk_size):
            output: torch.Tensor = super()._postprocess(
                hidden_states=hidden_states, labels=labels, loss_mask=loss_mask, **named
            )
            return output
        # The head's module is not called, but its hooks are: with --overlap-param-gather they wait
        # for its weights.
        for hook in self.output_layer._forward_pre_hooks.values():
            hook(self.output_layer, (hidden_states,))
        tp = self.pg_collection.tp
        # As in the output layer: gradients are summed over the parts of the vocabulary.
        if self.output_layer.sequence_parallel:
            h_SBD = gather_from_sequence_parallel_region(hidden_states, group=tp)
        else:
            h_SBD = copy_to_tensor_model_parallel_region(hidden_states, group=tp)
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        weight, main_gradient = self.with_main_gradient(weight)
        mask_BS = torch.ones_like(labels) if loss_mask is None else loss_mask
        losses_T = linear_cross_entropy(
            h_SBD.flatten(0, 1),
            weight,
            labels.t().flatten(),
            mask_BS.t().flatten().float(),
            tp,
            chunk_size,
            self.ops,
            self.vocab_size_of_losses,
            main_gradient,
        )
        return losses_T.view(h_SBD.shape[:2]).t().contiguous()


class Fp8GPTModel(LanguageModel):
    """A model chunk whose forward pass is one FP8 region, if its experts' scales need it.

    Its other layers are not Transformer Engine's, so the FP8 region does not affect them.
    """

    def __init__(self, fp8: Fp8Engine, **arguments: Any) -> None:
        """`arguments`: of LanguageModel."""
        super().__init__(**arguments)
        self.fp8 = fp8

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        with self.fp8.model_region():
            output: torch.Tensor = super().forward(*arguments, **named)
        return output
