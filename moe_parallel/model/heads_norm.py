"""RMSNorm over all attention heads of the queries, or of the keys, as in OLMoE.

Shape suffixes: S sequence, B batch, H heads of this rank, C width of a head, N = H C.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from moe_parallel.ops.rms_norm import rms_norm_of_parts
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
        y_SBN = rms_norm_of_parts(
            x_SBHC.flatten(2), self.weight, self.eps, self.width, lambda s: sum_over(s, self.tp)
        )
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


def over(heads: int, tp: dist.ProcessGroup) -> type[AllHeadsNorm]:
    """The norm over `heads` heads, which the ranks of `tp` divide."""
    return type("AllHeadsNorm", (AllHeadsNorm,), {"heads": heads, "tp": tp})
