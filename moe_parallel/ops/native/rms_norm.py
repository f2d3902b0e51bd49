"""RMSNorm, without a copy of x in fp32."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe_parallel.ops.native.fake import fake, fake_like
from moe_parallel.ops.once import once_differentiable
from moe_parallel.ops.reference import accumulation_dtype
from moe_parallel.ops.rms_norm import rms_norm as plain_rms_norm

_ops = torch.ops.moe_parallel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    width = x.size(-1)
    if x.is_cuda:
        if weight.dtype != x.dtype:  # torch's would round the gradient of the weight to x's dtype
            return plain_rms_norm(x, weight, eps)
        return functional.rms_norm(x, (width,), weight, eps)
    y, _ = _ops.rms_norm(x.reshape(x.numel() // width, width), weight, eps)
    return y.view(x.shape)


@fake("rms_norm")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.size(0), dtype=accumulation_dtype(x.dtype))


fake_like("rms_norm_backward", "x", "weight")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _ = inputs
    r = output[1]
    ctx.mark_non_differentiable(r)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, r)


@once_differentiable
def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    dx, dweight = _ops.rms_norm_backward(dy, *ctx.saved_tensors)
    return dx, dweight, None


torch.library.register_autograd("moe_parallel::rms_norm", _backward, setup_context=_save)
