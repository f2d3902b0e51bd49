"""Transformer Engine's DotProductAttention on a CPU, by its definition, in torch operators.

It takes and requires what the real one does (2.20.2), but for CUDA, and is strict where that one
guesses. It cannot show whether the real one does what its source says.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

BACKENDS = "moe_parallel.model.attention_backends"


class DotProductAttention(torch.nn.Module):
    calls = 0  # of all modules

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        layer_number: int | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0
        self.heads = num_attention_heads, num_gqa_groups or num_attention_heads
        self.channels, self.mask_type = kv_channels, attn_mask_type
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def get_extra_state(self) -> torch.Tensor:  # as the real one has
        return torch.zeros(1)

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        qkv_format: str,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
    ) -> torch.Tensor:
        type(self).calls += 1
        qkv = query_layer, key_layer, value_layer
        assert [x.shape[-2] for x in qkv] == [self.heads[0], self.heads[1], self.heads[1]]
        assert {x.shape[-1] for x in qkv} == {self.channels} and len({x.dtype for x in qkv}) == 1
        mask_type = attn_mask_type or self.mask_type
        if qkv_format == "sbhd":
            assert mask_type == "causal" and {x.dim() for x in qkv} == {4}
            by_sequence = zip(*(x.unbind(1) for x in qkv), strict=True)
            return torch.stack([self._attend(*each) for each in by_sequence], 1)
        assert (
            qkv_format == "thd" and mask_type == "padding_causal" and {x.dim() for x in qkv} == {3}
        )
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_kv) and cu_seqlens_q[0] == 0
        assert cu_seqlens_q[-1] == len(query_layer)
        lengths = cu_seqlens_q.diff().tolist()
        assert max_seqlen_q == max_seqlen_kv == max(lengths)
        by_document = zip(*(x.split(lengths) for x in qkv), strict=True)
        return torch.cat([self._attend(*each) for each in by_document])

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(self.heads[0] // self.heads[1], 1) for x in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q, k) * self.scale
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khc->qhc", weights, v).flatten(1)


@contextmanager
def stand_in() -> Iterator[type[DotProductAttention]]:
    """Transformer Engine is this module, and --attention-backend believes in a GPU."""
    here: Any = sys.modules[__name__]
    modules = {
        "transformer_engine": ModuleType("transformer_engine"),
        "transformer_engine.pytorch": here,
    }
    DotProductAttention.calls = 0
    on_gpu = mock.patch(f"{BACKENDS}._check_gpu", lambda *_: None)
    with mock.patch.dict(sys.modules, modules), on_gpu:
        yield DotProductAttention
