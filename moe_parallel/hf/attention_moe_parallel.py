"""Attention with rotary positions, and the norm of modeling_moe_parallel.py.

Shape suffixes: B sequences, S tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_moe_parallel import MoeParallelConfig


class MoeParallelRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32."""

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * x).to(hidden_states.dtype)


class MoeParallelRotaryEmbedding(nn.Module):
    """cos and sin of the positions' angles, [B, S, head_dim]."""

    inv_freq: torch.Tensor

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        assert config.rope_parameters is not None
        self.config, self.rope_type = config, config.rope_parameters["rope_type"]
        frequencies = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = frequencies(config)
        # `original_inv_freq`: transformers then fills both when it loads a model.
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: MoeParallelConfig, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, float]:
        assert config.rope_parameters is not None
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, heads, S, head_dim] at its positions; channel i turns with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(Q K^T * scaling + mask) V, for groups of queries that share a key."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    weights = logits.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class MoeParallelAttention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: MoeParallelConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.is_causal = config.head_dim**-0.5, True
        d, bias = config.hidden_size, config.attention_bias
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(d, q_width, bias=bias)
        self.k_proj = nn.Linear(d, kv_width, bias=bias)
        self.v_proj = nn.Linear(d, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, d, bias=False)
        self.norms_all_heads = config.qk_norm == "all"
        widths = {"all": (q_width, kv_width), "head": (config.head_dim, config.head_dim)}
        self.q_norm = self.k_norm = None
        if config.qk_norm is not None:
            self.q_norm, self.k_norm = (
                MoeParallelRMSNorm(width, config.rms_norm_eps) for width in widths[config.qk_norm]
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.norms_all_heads and getattr(self.q_proj, "tp_size", 1) > 1:  # a layer of vLLM
            raise ValueError(
                "the norm of queries and keys spans all heads, and vLLM divides the heads over its "
                f"ranks: set tensor_parallel_size to 1 instead of {self.q_proj.tp_size}"
            )
        query = _rotated(self._heads(self.q_proj(hidden_states), self.q_norm), *position_embeddings)
        key = _rotated(self._heads(self.k_proj(hidden_states), self.k_norm), *position_embeddings)
        value = self._heads(self.v_proj(hidden_states), None)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _heads(self, x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        """[B, S, heads * head_dim] -> [B, heads, S, head_dim]"""
        if norm is not None and self.norms_all_heads:
            x = norm(x)
        x = x.view(*x.shape[:-1], -1, self.head_dim)
        if norm is not None and not self.norms_all_heads:
            x = norm(x)
        return x.transpose(1, 2)
