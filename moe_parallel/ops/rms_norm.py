"""RMSNorm in plain torch, with a gradient that keeps x in its own dtype."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`y = x / sqrt(mean(x^2) + eps) * weight`, over the last dimension; y has the dtype of x.

    x: [..., D]; weight: [D]. Statistics and products are in fp32, or in fp64 for fp64.
    """
    return rms_norm_of_parts(x, weight, eps, x.shape[-1], lambda sums: sums)


def rms_norm_of_parts(
    x: Tensor, weight: Tensor, eps: float, width: int, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """`rms_norm` of rows of `width` numbers of which x, [..., D], and weight, [D], are a part.

    `total`: sums numbers [..., 1] over all parts. Both passes call it once.
    """
    y: Tensor = _RMSNorm.apply(x, weight, eps, width, total)
    return y


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number per row. On a CPU torch's own keeps x and the normalized x in fp32.

    With r = 1 / sqrt(mean(x^2) + eps), z = x r and g = dy * weight: dx = r (g - z mean(g z)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        width: int,
        total: Callable[[Tensor], Tensor],
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        z = x.to(wide)
        squares = torch.linalg.vector_norm(z, dim=-1, keepdim=True).square_()
        r = total(squares).div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        ctx.width, ctx.total = width, total
        return (z * r).mul_(weight.to(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        z, g = x.to(r.dtype) * r, dy.to(r.dtype)
        dweight = (g * z).flatten(0, -2).sum(0)
        g = g * weight.to(r.dtype)
        mean = ctx.total(torch.linalg.vecdot(g, z)[..., None]).div_(ctx.width)
        dx = g.addcmul_(z, mean, value=-1).mul_(r)
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None, None
