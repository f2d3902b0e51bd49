"""AoE's experts: E_i(x) = (SiLU(x W_down W_up) * (x W_p)) W_o (AoE paper, Algorithm 2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_parallel.experts.parameters import ExpertParameters
from moe_parallel.experts.swiglu import gated
from moe_parallel.ops import Ops
from moe_parallel.parallel import Groups


class LowRankExperts(ExpertParameters):
    """The experts of this rank, without their W_down: every rank needs all of those to rank.

    The layer owns W_down and passes the part of the local experts. C = x W_down is computed anew
    from the dispatched rows instead of being sent: the row is d wide and has to travel anyway, C
    would add d_low, and the product is short.

    Shape suffixes: N rows sorted by expert, L experts here, D model width, R low-rank size (d_low),
    W wide size here (d_wide divided by etp).
    """

    w_up_LRW: torch.Tensor
    w_p_LDW: torch.Tensor
    w_out_LWD: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        low_rank_size: int,
        wide_size: int,
        groups: Groups,
        ops: Ops,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(num_experts, groups, dtype)
        self.ops = ops
        self.add_weight("w_up_LRW", (low_rank_size, wide_size), sharded_axis=2)
        self.add_weight("w_p_LDW", (hidden_size, wide_size), sharded_axis=2)
        self.add_weight("w_out_LWD", (wide_size, hidden_size), sharded_axis=1)

    def forward(
        self,
        x_ND: torch.Tensor,
        gates_N: torch.Tensor,
        counts_L: torch.Tensor,
        w_down_LDR: torch.Tensor,
    ) -> torch.Tensor:
        """gate * E_i(x) of each row; with etp > 1 this rank's part of the sum over W: [N, D]."""
        gemm = self.ops.grouped_gemm
        c_NR = gemm(x_ND, w_down_LDR, counts_L)
        g_NW = F.silu(gemm(c_NR, self.w_up_LRW, counts_L))
        h_NW = gated(g_NW * gemm(x_ND, self.w_p_LDW, counts_L), gates_N)
        return gemm(h_NW, self.w_out_LWD, counts_L)

    def local(self, w_down_EDR: torch.Tensor) -> torch.Tensor:
        """The part of W_down that belongs to the experts of this rank: [L, D, R]."""
        first = self.groups.ep.rank() * self.num_local_experts
        return w_down_EDR[first : first + self.num_local_experts]
