"""RMSNorm for hosts without Transformer Engine, with sequence parallelism."""

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """`y = x / sqrt(mean(x^2) + eps) * weight`, over the last dimension.

    Statistics are computed in fp32 for every dtype of x; y has the dtype of x. Under sequence
    parallelism every tensor-parallel rank normalizes its own positions, so the weight's gradient
    must be summed over those ranks. Megatron-Core's finalize_model_grads does that for parameters
    marked `sequence_parallel`. (Megatron-Core's own torch norm lacks the mark and refuses.)

    Megatron-Core's specs build it as `RMSNorm(config=..., hidden_size=..., eps=...)`. Attributes
    and parameters have the names of the other norms, so that checkpoints agree.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        weight: Any = nn.Parameter(torch.ones(hidden_size))
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size] -> [..., hidden_size]."""
        if x.is_cuda:
            return nn.functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)
        y: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return y


class _RMSNorm(torch.autograd.Function):
    """Keeps x in its own dtype and one number per row, as torch's does on a GPU. On a CPU torch's
    keeps x and the normalized x in fp32, and its backward pass takes three times as long.

    With r = 1 / sqrt(mean(x^2) + eps), z = x r and g = dy * weight: dx = r (g - z mean(g z)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_fp32 = x.float()
        r = torch.linalg.vector_norm(x_fp32, dim=-1, keepdim=True)
        r.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x_fp32 * r).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        z, g = x.float() * r, dy.float()
        dweight = (g * z).flatten(0, -2).sum(0)
        g = g * weight.float()
        mean = torch.linalg.vecdot(g, z)[..., None].div_(x.shape[-1])
        dx = g.addcmul_(z, mean, value=-1).mul_(r)
        return dx.to(x.dtype), dweight.to(weight.dtype), None
