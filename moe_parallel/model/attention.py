"""Core attention whose memory grows with S, not with S x S: torch's scaled_dot_product_attention.

Shape suffixes: S sequence, B batch (Megatron's order), H attention heads of this rank, G key/value
heads of this rank, C width of a head.
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
        self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config)
        assert config.kv_channels is not None
        self.scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        q_SBHC: torch.Tensor,
        k_SBGC: torch.Tensor,
        v_SBGC: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        """[S, B, H, C], twice [S, B, G, C] -> [S, B, H * C], in the dtype of q.

        Raises RuntimeError if none of the kernels serves the device, the dtype and the shapes.
        """
        assert attention_mask is None, "the mask is causal"
        with sdpa_kernel(self.kernels):
            y_BHSC = F.scaled_dot_product_attention(
                q_SBHC.permute(1, 2, 0, 3),
                k_SBGC.permute(1, 2, 0, 3),
                v_SBGC.permute(1, 2, 0, 3),
                is_causal=True,
                scale=self.scale,
                enable_gqa=q_SBHC.shape[2] != k_SBGC.shape[2],
            )
        return y_BHSC.permute(2, 0, 1, 3).flatten(2)


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
