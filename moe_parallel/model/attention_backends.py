"""The values of --attention-backend: a kernel of torch, or a module of somebody else.

Shape suffixes: S sequence, B batch (Megatron's order), T = B * S tokens, N documents in them, H
attention heads of this rank, G key/value heads of this rank, C width of a head.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import SDPBackend

from moe_parallel.copies import copied_to
from moe_parallel.errors import InputError
from moe_parallel.model.attention import TorchAttention, positions_first, sequences_first
from moe_parallel.ops import select_backend
from moe_parallel.ops.causal_attention import serves
from moe_parallel.optional import import_optional
from moe_parallel.platform.device import device
from moe_parallel.selection.tokens import Share

#: In fp32 torch's kernel is as fast for a document of this length, and faster for shorter ones.
SHORTEST_IN_FP32 = 64


class AutoAttention(TorchAttention):
    """The native operator where it is faster than torch's kernels, for sequences and documents."""

    def forward(
        self,
        q_SBHC: torch.Tensor,
        k_SBGC: torch.Tensor,
        v_SBGC: torch.Tensor,
        attends_to: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        # Whole sequences need neither the views that documents do nor bf16 as fp32.
        has_whole_sequences = self.cp is None or self.cp.size() == 1
        if attends_to is None and has_whole_sequences and serves(q_SBHC, k_SBGC, v_SBGC):
            y_SBHC = select_backend("native").attention(q_SBHC, k_SBGC, v_SBGC, self.scale)
            return y_SBHC.flatten(2)
        return super().forward(q_SBHC, k_SBGC, v_SBGC, attends_to)

    def _kernel(
        self, q_BHQC: torch.Tensor, k_BGKC: torch.Tensor, v_BGKC: torch.Tensor, **mask: Any
    ) -> torch.Tensor:
        q_QBHC, k_KBGC, v_KBGC = (x.permute(2, 0, 1, 3) for x in (q_BHQC, k_BGKC, v_BGKC))
        is_short = q_BHQC.dtype == torch.float32 and q_BHQC.shape[2] < SHORTEST_IN_FP32
        if "attn_mask" in mask or is_short or not serves(q_QBHC, k_KBGC, v_KBGC):
            return super()._kernel(q_BHQC, k_BGKC, v_BGKC, **mask)
        y_QBHC = select_backend("native").attention(q_QBHC, k_KBGC, v_KBGC, self.scale)
        return y_QBHC.permute(1, 2, 0, 3)


class FlashAttention(TorchAttention):
    """A flash kernel, or an error."""

    kernels = [SDPBackend.FLASH_ATTENTION]

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        """Raises InputError on a GPU in fp32."""
        _check_bf16("flash", config)
        super().__init__(config, *args, **options)


class FusedAttention(TorchAttention):
    """cuDNN's kernel, or an error."""

    kernels = [SDPBackend.CUDNN_ATTENTION]

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        """Raises InputError on a CPU, and on a GPU in fp32."""
        _check_gpu("fused", "cuDNN")
        _check_bf16("fused", config)
        super().__init__(config, *args, **options)


class UnfusedAttention(TorchAttention):
    """torch operators that write S x S scores; the numbers are those of the definition."""

    kernels = [SDPBackend.MATH]


class TransformerEngineAttention(TorchAttention):
    """Transformer Engine's DotProductAttention, which chooses a kernel of flash-attn or cuDNN.

    Documents that do not see each other are one launch, however many they are. If neither package
    has a kernel for the shapes, Transformer Engine takes its own, which writes S x S scores.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        """Raises InputError on a CPU, in fp32 and without Transformer Engine."""
        _check_gpu("transformer_engine", "Transformer Engine")
        _check_bf16("transformer_engine", config)
        super().__init__(config, *args, **options)
        engine = import_optional(
            "transformer_engine.pytorch", "--attention-backend transformer_engine"
        )
        tp = getattr(options.get("pg_collection"), "tp", None)
        ranks = 1 if tp is None else tp.size()
        assert config.num_query_groups is not None and config.kv_channels is not None
        # Not a child module: it has no weights, but would add an entry to every checkpoint.
        self._engines = (
            engine.DotProductAttention(
                num_attention_heads=config.num_attention_heads // ranks,
                kv_channels=config.kv_channels,
                num_gqa_groups=config.num_query_groups // ranks,
                attention_dropout=0.0,
                attn_mask_type="causal",
                layer_number=self.layer_number,
                softmax_scale=self.scale,
            ),
        )

    def _attend_to_all(
        self, q_SBHC: torch.Tensor, k_SBGC: torch.Tensor, v_SBGC: torch.Tensor, share: Share
    ) -> torch.Tensor:
        (engine,) = self._engines
        y_SBD: torch.Tensor = engine(q_SBHC, k_SBGC, v_SBGC, qkv_format="sbhd")
        return y_SBD

    def _attend_to_own(
        self,
        q_SBHC: torch.Tensor,
        k_SBGC: torch.Tensor,
        v_SBGC: torch.Tensor,
        share: Share,
        lengths: list[int],
    ) -> torch.Tensor:
        (engine,) = self._engines
        begins_N = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)  # and the last end
        begins_N = copied_to(q_SBHC.device, begins_N)
        y_TD = engine(
            *map(sequences_first, (q_SBHC, k_SBGC, v_SBGC)),
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=begins_N,
            cu_seqlens_kv=begins_N,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        return positions_first(y_TD, q_SBHC.shape[1])


def _check_gpu(backend: str, whose: str) -> None:
    if device().type == "cpu":
        raise InputError(
            f"--attention-backend {backend} is {whose}, which needs a GPU: "
            "use --attention-backend auto"
        )


def _check_bf16(backend: str, config: TransformerConfig) -> None:
    if device().type == "cuda" and config.params_dtype == torch.float32:
        raise InputError(
            f"--attention-backend {backend} computes no fp32 on a GPU: set --bf16, or use "
            "--attention-backend auto"
        )


#: The values of --attention-backend. `local` is Megatron-Core's own module, which writes and keeps
#: S x S scores.
CORE_ATTENTIONS: dict[str, type[MegatronModule]] = {
    "auto": AutoAttention,
    "flash": FlashAttention,
    "fused": FusedAttention,
    "unfused": UnfusedAttention,
    "transformer_engine": TransformerEngineAttention,
    "local": DotProductAttention,
}
