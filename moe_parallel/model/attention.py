"""Core attention whose memory grows with S, not with S x S: torch's scaled_dot_product_attention.

Shape suffixes: S sequence, B batch (Megatron's order), T = B * S tokens, N documents in them, H
attention heads of this rank, G key/value heads of this rank, C width of a head.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

from moe_parallel.config import TrainingConfig
from moe_parallel.layers.past import Past
from moe_parallel.platform.device import device, fast_factors


class TorchAttention(MegatronModule):
    """Causal attention, softmax(Q K^T / sqrt(C)) V, by the kernel that torch selects.

    The flash kernels compute it in tiles and keep one fp32 number per row of the scores for the
    backward pass (Dao 2023, arXiv 2307.08691). H / G heads share a key/value head without copies of
    it. The module has no weights, so a checkpoint is the same with every kernel.

    Megatron-Core's specs build it with the arguments of its own DotProductAttention; those that are
    not named here do not apply.
    """

    #: torch uses one of these, by the device, the dtype and the shapes.
    kernels: ClassVar[list[SDPBackend]] = [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        assert config.kv_channels is not None
        self.scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        q_SBHC: torch.Tensor,
        k_SBGC: torch.Tensor,
        v_SBGC: torch.Tensor,
        attends_to: torch.Tensor | Past | None,
        **_: Any,
    ) -> torch.Tensor:
        """[S, B, H, C], twice [S, B, G, C] -> [S, B, H * C], in the dtype of q.

        Args:
            attends_to: what `own_documents` returns: None, or the lengths of the documents of all
                sequences, one sequence after another (int64, on the CPU). A token then attends
                only to its own document, and scores between documents are not computed. Or the
                tokens before these, which also keeps the new keys and values.

        Raises RuntimeError if none of the kernels serves the device, the dtype and the shapes.
        """
        if isinstance(attends_to, Past):
            return self._continue(q_SBHC, k_SBGC, v_SBGC, attends_to)
        # Without instructions for bf16, torch's flash kernel takes six times as long in it.
        qkv = fast_factors(q_SBHC, k_SBGC, v_SBGC)
        return self._attend_all(qkv, attends_to).to(q_SBHC.dtype)

    def _continue(
        self, q_SBHC: torch.Tensor, k_SBGC: torch.Tensor, v_SBGC: torch.Tensor, past: Past
    ) -> torch.Tensor:
        kept = past.extend(self.layer_number, k_SBGC, v_SBGC)
        if past.length_B is None:
            return self._attend_all(fast_factors(q_SBHC, k_SBGC, v_SBGC), None).to(q_SBHC.dtype)
        q_BSHC, k_BPGC, v_BPGC = fast_factors(q_SBHC.transpose(0, 1), *kept)
        places_P = torch.arange(k_BPGC.shape[1], device=q_BSHC.device)
        sees_B11P = (places_P <= past.length_B[:, None])[:, None, None]
        # Without the kernels of `kernels`, because some take no mask.
        y_BHSC = F.scaled_dot_product_attention(
            q_BSHC.transpose(1, 2),
            k_BPGC.transpose(1, 2),
            v_BPGC.transpose(1, 2),
            attn_mask=sees_B11P,
            scale=self.scale,
            enable_gqa=q_BSHC.shape[2] != k_BPGC.shape[2],
        )
        return y_BHSC.permute(2, 0, 1, 3).flatten(2).to(q_SBHC.dtype)

    def _attend_all(
        self, qkv: tuple[torch.Tensor, ...], lengths_N: torch.Tensor | None
    ) -> torch.Tensor:
        with sdpa_kernel(self.kernels):
            if lengths_N is None:
                y_BHSC = self._attend(*(x.permute(1, 2, 0, 3) for x in qkv))
                return y_BHSC.permute(2, 0, 1, 3).flatten(2)
            # One call a document. `split`, unlike slices, has a backward pass without additions.
            lengths = lengths_N.tolist()
            pieces = [x.transpose(0, 1).flatten(0, 1).split(lengths) for x in qkv]
            y_THC = torch.cat(
                [
                    self._attend(*(x.transpose(0, 1)[None] for x in document))[0].transpose(0, 1)
                    for document in zip(*pieces, strict=True)
                ]
            )
        sequences, batch = qkv[0].shape[:2]
        y_BSD = y_THC.flatten(1).unflatten(0, (batch, sequences))
        return y_BSD.transpose(0, 1).contiguous()

    def _attend(
        self, q_BHSC: torch.Tensor, k_BGSC: torch.Tensor, v_BGSC: torch.Tensor
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q_BHSC,
            k_BGSC,
            v_BGSC,
            is_causal=True,
            scale=self.scale,
            enable_gqa=q_BHSC.shape[1] != k_BGSC.shape[1],
        )


class FlashAttention(TorchAttention):
    """A flash kernel, or an error."""

    kernels = [SDPBackend.FLASH_ATTENTION]


class FusedAttention(TorchAttention):
    """cuDNN's kernel, or an error."""

    kernels = [SDPBackend.CUDNN_ATTENTION]


class UnfusedAttention(TorchAttention):
    """torch operators that write S x S scores; the numbers are those of the definition."""

    kernels = [SDPBackend.MATH]


#: The values of --attention-backend. `local` is Megatron-Core's own module, which writes and keeps
#: S x S scores.
BACKENDS: dict[str, type[MegatronModule]] = {
    "auto": TorchAttention,
    "flash": FlashAttention,
    "fused": FusedAttention,
    "unfused": UnfusedAttention,
    "local": DotProductAttention,
}


def own_documents(position_ids_BS: torch.Tensor, training: TrainingConfig) -> torch.Tensor | None:
    """What the model's attention takes as its mask: None if a token attends to all before it.

    Args:
        position_ids_BS: on the CPU; 0 where a document begins.
        training: has --reset-attention-mask and --attention-backend.

    Returns the lengths of the documents (int64 [N], on the CPU), or for Megatron-Core's own module
    a mask: bool [B, 1, S, S] on the device of the model, True where a query must not see a key.
    """
    if not training.reset_attention_mask:
        return None
    begins_BS = position_ids_BS == 0
    begins_BS[:, 0] = True
    if training.attention_backend != "local":
        begins_N = begins_BS.flatten().nonzero()[:, 0]
        return torch.diff(begins_N, append=begins_N.new_tensor([begins_BS.numel()]))
    document_BS = begins_BS.cumsum(1)
    of_another_BSS = document_BS[:, :, None] != document_BS[:, None, :]
    return (of_another_BSS | torch.ones_like(of_another_BSS).triu(1))[:, None].to(device())
