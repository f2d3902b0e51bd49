"""RMSNorm for hosts without Transformer Engine, with sequence parallelism."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe_parallel.ops import Ops, select_backend


class RMSNorm(nn.Module):
    """`y = x / sqrt(mean(x^2) + eps) * weight`, over the last dimension, by `Ops.rms_norm`.

    Statistics are computed in fp32 for every dtype of x; y has the dtype of x. Under sequence
    parallelism every tensor-parallel rank normalizes its own positions, so the weight's gradient
    must be summed over those ranks. Megatron-Core's finalize_model_grads does that for parameters
    marked `sequence_parallel`. (Megatron-Core's own torch norm lacks the mark and refuses.)

    Megatron-Core's specs build it as `RMSNorm(config=..., hidden_size=..., eps=...)`. Attributes
    and parameters have the names of the other norms, so that checkpoints agree.
    """

    ops: ClassVar[Ops] = select_backend("reference")

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        weight: Any = nn.Parameter(torch.ones(hidden_size))
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size] -> [..., hidden_size]."""
        return self.ops.rms_norm(x, self.weight, self.eps)


def norm_by(ops: Ops) -> type[RMSNorm]:
    """The norm computed by `ops`."""
    return type("RMSNorm", (RMSNorm,), {"ops": ops})
