"""RMSNorm over all attention heads of the queries, or of the keys, as in OLMoE.

Shape suffixes: S sequence, B batch, H heads of this rank, C width of a head, N = H C.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from moe_parallel.parallel import sum_over


class AllHeadsNorm(nn.Module):
    """`y = x / sqrt(mean(x^2) + eps) * weight`, with the mean over the heads of all ranks.

    Tensor parallelism divides the heads, and with them the weight. The ranks exchange one sum of
    squares per token. Statistics are in fp32; y has the dtype of x. `over` makes the class that
    Megatron-Core's specs build as `Norm(hidden_size=C, config=..., eps=...)`.
    """

    heads: ClassVar[int]  # on all ranks
    tp: ClassVar[dist.ProcessGroup]

    def __init__(self, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.width = self.heads * hidden_size
        weight: Any = nn.Parameter(torch.ones(self.width // self.tp.size()))
        weight.tensor_model_parallel = True
        weight.partition_dim, weight.partition_stride = 0, 1
        self.weight = weight

    def forward(self, x_SBHC: torch.Tensor) -> torch.Tensor:
        """[S, B, H, C] -> [S, B, H, C]."""
        y_SBN: torch.Tensor = _Norm.apply(x_SBHC.flatten(2), self.weight, self)
        return y_SBN.view_as(x_SBHC)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The weight as this rank's part of one of all heads."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets
        )
        return sharded


class _Norm(torch.autograd.Function):
    """Keeps x in its own dtype and one number per token, as the norm of `ops.rms_norm` does.

    With r = 1 / sqrt(mean(x^2) + eps), z = x r and g = dy * weight: dx = r (g - z mean(g z)). Both
    means are over the heads of all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, x_SBN: torch.Tensor, weight_N: torch.Tensor, norm: AllHeadsNorm
    ) -> torch.Tensor:
        z_SBN = x_SBN.float()
        squares_SB1 = sum_over(z_SBN.square().sum(2, keepdim=True), norm.tp)
        r_SB1 = torch.rsqrt(squares_SB1 / norm.width + norm.eps)
        ctx.save_for_backward(x_SBN, weight_N, r_SB1)
        ctx.norm = norm
        return (z_SBN * r_SB1).mul_(weight_N.float()).to(x_SBN.dtype)

    @staticmethod
    def backward(ctx: Any, dy_SBN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x_SBN, weight_N, r_SB1 = ctx.saved_tensors
        z_SBN, g_SBN = x_SBN.float() * r_SB1, dy_SBN.float()
        dweight_N = (g_SBN * z_SBN).flatten(0, 1).sum(0)
        g_SBN = g_SBN * weight_N.float()
        products_SB1 = sum_over((g_SBN * z_SBN).sum(2, keepdim=True), ctx.norm.tp)
        dx_SBN = g_SBN.addcmul_(z_SBN, products_SB1 / ctx.norm.width, value=-1).mul_(r_SB1)
        return dx_SBN.to(x_SBN.dtype), dweight_N.to(weight_N.dtype), None


def over(heads: int, tp: dist.ProcessGroup) -> type[AllHeadsNorm]:
    """The norm over `heads` heads, which the ranks of `tp` divide."""
    return type("AllHeadsNorm", (AllHeadsNorm,), {"heads": heads, "tp": tp})
