"""Dense SwiGLU layers: Megatron-Core's linear layers with the experts' SwiGLU operator between."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import ProcessGroup

from moe_parallel.experts.linear import linear_by
from moe_parallel.ops import Ops


class DenseMLP(MLP):
    """Megatron-Core's MLP, split over the tensor-parallel ranks as there, with the same weights.

    Megatron-Core's keeps the input of SwiGLU, SiLU of the gate, a copy of the other half, and the
    output for the backward pass. This one keeps the input and the output. Shape suffixes: S
    sequence, B batch, D model width, F inner width on this rank, N = S * B.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        ops: Ops,
        tp_group: ProcessGroup,
        recomputes: bool = False,
        **_: Any,  # what versions of Megatron-Core pass to each layer
    ) -> None:
        """
        Args:
            config: ffn_hidden_size is the inner width over all ranks; there are no biases.
            submodules: the linear layers.
            ops: the operators.
            tp_group: the tensor-parallel ranks.
            recomputes: keep only the input for the backward pass.
        """
        width = config.ffn_hidden_size
        super().__init__(config, submodules, ffn_hidden_size=width, tp_group=tp_group)
        self.ops = ops
        self.recomputes = recomputes

    def forward(self, hidden_SBD: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[S, B, D] -> ([S, B, D], None); with sequence parallelism, S is this rank's share."""
        if self.recomputes and torch.is_grad_enabled():
            y_SBD: torch.Tensor = checkpoint(self._output, False, hidden_SBD)
            return y_SBD, None
        return self._output(hidden_SBD), None

    def _output(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        gate_up_SB2F, _ = self.linear_fc1(hidden_SBD)
        h_NF = self.ops.swiglu_halves(gate_up_SB2F.flatten(0, 1))
        y_SBD: torch.Tensor
        y_SBD, _ = self.linear_fc2(h_NF.unflatten(0, gate_up_SB2F.shape[:2]))
        return y_SBD


def split_dense(config: TransformerConfig, width: int, ops: Ops, group: ProcessGroup) -> DenseMLP:
    """A dense layer of another width than the model's, split over `group`."""
    config = copy.copy(config)  # Megatron-Core takes the width from here, whatever the argument
    config.ffn_hidden_size = width
    column, row = linear_by(ops)
    return DenseMLP(config, MLPSubmodules(linear_fc1=column, linear_fc2=row), ops, group)
