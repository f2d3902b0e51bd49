"""Causal attention on the CPU, in blocks that stay in its caches."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake, fake_like
from moe_parallel.ops.once import once_differentiable
from moe_parallel.ops.reference import accumulation_dtype

_ops = torch.ops.moe_parallel


def attention(q_SBHC: Tensor, k_SBGC: Tensor, v_SBGC: Tensor, scale: float) -> Tensor:
    return _ops.attention(q_SBHC, k_SBGC, v_SBGC, scale)[0]


@fake("attention")
def _(q: Tensor) -> tuple[Tensor, Tensor]:
    length, batch, heads, _ = q.shape
    logsumexp = q.new_empty(batch, heads, length, dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), logsumexp


fake_like("attention_backward", "q", "k", "v")


def _save(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]
) -> None:
    *qkv, ctx.scale = inputs
    ctx.save_for_backward(*qkv, *output)
    ctx.mark_non_differentiable(output[1])


@once_differentiable
def _backward(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    return *_ops.attention_backward(dout, *ctx.saved_tensors, ctx.scale), None


torch.library.register_autograd("moe_parallel::attention", _backward, setup_context=_save)
