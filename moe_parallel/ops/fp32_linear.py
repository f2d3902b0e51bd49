"""Linear layers that compute in fp32 and keep their input in its own dtype.

`x.float()` before an ordinary layer would be kept for the backward pass: 4 bytes for each number
of x, instead of the 2 of x in bf16, which other parts of a layer mostly keep anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def fp32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x weight^T` in fp32. x: [..., T, D]; weight: [F, D]; returns [..., T, F], fp32."""
    y: Tensor = _Fp32Linear.apply(x, weight)
    return y


def fp32_dot(x: Tensor, weight: Tensor) -> Tensor:
    """`fp32_linear` for one column, as a sum: x [..., T, D], weight [1, D]; returns [..., T, 1].

    On AMD processors MKL's bits of a product with one column depend on the address of x.
    """
    y: Tensor = _Fp32Dot.apply(x, weight)
    return y


class _Fp32Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dx = (dy @ weight.float()).to(x.dtype)
        dweight = dy.flatten(0, -2).t() @ x.flatten(0, -2).float()
        return dx, dweight.to(weight.dtype)


class _Fp32Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float() * weight.float()).sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dx = (dy * weight.float()).to(x.dtype)
        dweight = (dy * x).flatten(0, -2).sum(0, keepdim=True)  # fp32, because dy is
        return dx, dweight.to(weight.dtype)
