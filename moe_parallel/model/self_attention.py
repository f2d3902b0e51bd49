"""Megatron-Core's self-attention with the operator of rotary position embeddings.

Megatron-Core rotates queries and keys with some twenty operators in each layer. On a GPU the host
launches each of them, and small layers train no faster than the host launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp

from moe_parallel.ops import Ops


class RotarySelfAttention(SelfAttention):
    """Rotates queries and keys as soon as they are computed; the rest gets no angles."""

    def __init__(self, *arguments: Any, ops: Ops, **named: Any) -> None:
        """`ops`: the operators; all else is Megatron-Core's."""
        super().__init__(*arguments, **named)
        self._ops = ops
        self._angles: torch.Tensor | None = None  # only within a forward pass

    def forward(
        self, *arguments: Any, rotary_pos_emb: torch.Tensor | None = None, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As in Megatron-Core. `rotary_pos_emb`: the angles, [S, 1 or B, 1, C]."""
        with self._rotating_by(rotary_pos_emb):
            output: tuple[torch.Tensor, torch.Tensor | None] = super().forward(*arguments, **named)
        return output

    def get_query_key_value_tensors(self, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        """The queries and keys, rotated, and the values: [S, B, heads, C] each."""
        if self._angles is not None and self._rotates_all:
            named["split_qkv"] = False
            qkv_SBGX, _ = super().get_query_key_value_tensors(*arguments, **named)
            return self._ops.split_and_rotate(qkv_SBGX, self._angles)
        q_SBHC, k_SBGC, *others = super().get_query_key_value_tensors(*arguments, **named)
        if self._angles is not None:
            q_SBHC, k_SBGC = self._ops.rotary(q_SBHC, k_SBGC, self._angles)
        return q_SBHC, k_SBGC, *others

    @property
    def _rotates_all(self) -> bool:
        """Whether nothing happens to queries and keys before they are rotated: no norm, and no
        selection of queries, as there is if tensor-parallel ranks share a head of keys."""
        norms = (self.q_layernorm, self.k_layernorm)
        has_norms = any(norm is not None and not isinstance(norm, IdentityOp) for norm in norms)
        return not has_norms and self.config.num_query_groups >= self.world_size

    @contextlib.contextmanager
    def _rotating_by(self, angles: torch.Tensor | None) -> Iterator[None]:
        self._angles = angles
        try:
            yield
        finally:
            self._angles = None
