"""SwiGLU experts: E_i(x) = (SiLU(x W_g) * (x W_p)) W_o (Shazeer 2020), gate applied inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_parallel.experts.parameters import ExpertParameters
from moe_parallel.ops import Ops
from moe_parallel.parallel import Groups


class SwiGLUExperts(ExpertParameters):
    """The routed experts of this rank. W_g and W_p are one tensor, so that x is read once.

    Shape suffixes: N rows sorted by expert, L experts here, D model width, F expert width here
    (divided by etp).
    """

    w_gate_up_LD2F: torch.Tensor  # W_g at index 0, W_p at index 1 of the axis of size 2
    w_out_LFD: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        groups: Groups,
        ops: Ops,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(num_experts, groups, dtype)
        self.ops = ops
        self.add_weight("w_gate_up_LD2F", (hidden_size, 2, ffn_hidden_size), sharded_axis=3)
        self.add_weight("w_out_LFD", (ffn_hidden_size, hidden_size), sharded_axis=1)

    def forward(
        self, x_ND: torch.Tensor, gates_N: torch.Tensor, counts_L: torch.Tensor
    ) -> torch.Tensor:
        """gate * E_i(x) of each row; with etp > 1 this rank's part of the sum over F: [N, D]."""
        w_gate_up = self.w_gate_up_LD2F.flatten(2)
        gate_NF, up_NF = self.ops.grouped_gemm(x_ND, w_gate_up, counts_L).chunk(2, dim=1)
        h_NF = gated(F.silu(gate_NF) * up_NF, gates_N)
        return self.ops.grouped_gemm(h_NF, self.w_out_LFD, counts_L)


def gated(h_NF: torch.Tensor, gates_N: torch.Tensor) -> torch.Tensor:
    """Rows scaled by their fp32 gates, rounded once to the dtype of h.

    Scaling h instead of the output means the output need not be kept for the gate's gradient.
    """
    return (h_NF * gates_N[:, None]).to(h_NF.dtype)
