"""RMSNorm in plain torch, with a gradient that keeps x in its own dtype."""

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`y = x / sqrt(mean(x^2) + eps) * weight`, over the last dimension; y has the dtype of x.

    x: [..., D]; weight: [D]. Statistics and products are in fp32, or in fp64 for fp64.
    """
    y: Tensor = _RMSNorm.apply(x, weight, eps)
    return y


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number per row. On a CPU torch's own keeps x and the normalized x in fp32.

    With r = 1 / sqrt(mean(x^2) + eps), z = x r and g = dy * weight: dx = r (g - z mean(g z)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        z = x.to(wide)
        r = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        r.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (z * r).mul_(weight.to(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        z, g = x.to(r.dtype) * r, dy.to(r.dtype)
        dweight = (g * z).flatten(0, -2).sum(0)
        g = g * weight.to(r.dtype)
        mean = torch.linalg.vecdot(g, z)[..., None].div_(x.shape[-1])
        dx = g.addcmul_(z, mean, value=-1).mul_(r)
        return dx.to(x.dtype), dweight.to(weight.dtype), None
