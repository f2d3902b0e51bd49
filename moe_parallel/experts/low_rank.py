"""AoE's experts: E_i(x) = (SiLU(x W_down W_up) * (x W_p)) W_o (AoE paper, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from moe_parallel.dispatch.dispatched import Dispatched
from moe_parallel.experts.parameters import ExpertParameters, Matrices, split_experts
from moe_parallel.ops import Ops, RowMap
from moe_parallel.parallel import Groups


class LowRankExperts(ExpertParameters):
    """The experts of this rank without W_down, which belongs to the layer.

    Every rank needs W_down of all experts for the selection. If C = x W_down of the choices is
    given, it is used. Otherwise it is recomputed from x: the row of x (d numbers) is sent anyway,
    C would add d_low numbers, and the product is small.

    Shape suffixes: M rows received, J choices of each, L experts here, D model width, R low-rank
    size (d_low), W wide size here (d_wide divided by etp).
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
        recompute_gate: bool = True,
        up_std: float | None = None,
    ) -> None:
        """
        Args:
            recompute_gate: recompute C W_up in the backward pass instead of keeping it.
            up_std: the standard deviation of the initial W_up. None: that of the other weights.
        """
        super().__init__(num_experts, groups, dtype)
        self.ops = ops
        self.recompute_gate = recompute_gate
        self.add_weight("w_up_LRW", (low_rank_size, wide_size), sharded_axis=2, init_std=up_std)
        self.add_weight("w_p_LDW", (hidden_size, wide_size), sharded_axis=2)
        self.add_weight("w_out_LWD", (wide_size, hidden_size), sharded_axis=1)

    def outputs_of_parts(
        self, rows: Iterable[Dispatched[Any]], w_down_LDR: torch.Tensor, parts: int
    ) -> Iterator[torch.Tensor]:
        """`forward` for one of `parts` parts of the experts after the other."""
        weights = self.matrices_of_parts(parts, self.w_up_LRW, self.w_p_LDW, self.w_out_LWD)
        down = split_experts(w_down_LDR, parts)
        for each, w_down, of_part in zip(rows, down, weights, strict=True):
            assert each.norms_MJ is None  # only the local dispatcher passes them on
            yield self(each.x_MD, each.probs_MJ, each.row_map, w_down, each.c_MJR, of_part=of_part)

    def forward(
        self,
        x_MD: torch.Tensor,
        probs_MJ: torch.Tensor,
        row_map: RowMap,
        w_down_LDR: torch.Tensor,
        c_MJR: torch.Tensor | None = None,
        norms_MJ: torch.Tensor | None = None,
        of_part: Matrices | None = None,
    ) -> torch.Tensor:
        """The sum of prob * E_i(x) over each token's choices: [M, D].

        With etp > 1 it is this rank's part of the sum over W. With the norms of C, the probs are
        their softmax, and the backward pass goes on through them to x and W_down. `of_part`: the
        weights, but W_down, of the part of the experts whose rows these are; None: all.
        """
        weights, main = of_part or self.matrices(self.w_up_LRW, self.w_p_LDW, self.w_out_LWD)
        return self.ops.autonomous_experts(
            x_MD,
            probs_MJ,
            row_map,
            w_down_LDR,
            *weights,
            c_TKR=c_MJR,
            norms_TK=norms_MJ,
            recompute_gate=self.recompute_gate,
            main_gradients=main,
        )
