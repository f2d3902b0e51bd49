"""The experts of `swiglu` and `low_rank` with their products in FP8; the weights are the same.

    permute, padding each expert's rows -> linear -> SwiGLU with the probs -> linear -> unpermute

Linear layers take and return bf16 and compute in FP8. The operators compute everything else in
bf16, including C = x W_down, by which experts are ranked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moe_parallel.dispatch.dispatched import probs_of_rows, rows_of_choices
from moe_parallel.experts.fp8_engine import Fp8Engine
from moe_parallel.experts.low_rank import LowRankExperts
from moe_parallel.experts.parameters import Matrices
from moe_parallel.experts.swiglu import SwiGLUExperts
from moe_parallel.ops import RowMap
from moe_parallel.ops.aligned_rows import aligned_rows


def swiglu_experts(fp8: Fp8Engine | None) -> Callable[..., SwiGLUExperts]:
    """The class or function that builds SwiGLU experts; in FP8 if `fp8` is given."""
    return SwiGLUExperts if fp8 is None else partial(Fp8SwiGLUExperts, fp8)


def low_rank_experts(fp8: Fp8Engine | None) -> Callable[..., LowRankExperts]:
    """The class or function that builds AoE's experts; in FP8 if `fp8` is given."""
    return LowRankExperts if fp8 is None else partial(Fp8LowRankExperts, fp8)


class Fp8SwiGLUExperts(SwiGLUExperts):
    """E_i(x) = (SiLU(x W_g) * (x W_p)) W_o with all three products in FP8."""

    def __init__(self, fp8: Fp8Engine, *arguments: Any) -> None:
        """`arguments`: those of SwiGLUExperts."""
        super().__init__(*arguments)
        self.fp8 = fp8
        experts, d, two, f = self.w_gate_up_LD2F.shape
        self._gate_up = fp8.grouped_linear(experts, d, two * f)
        self._out = fp8.grouped_linear(experts, f, d)

    def forward(
        self,
        x_MD: torch.Tensor,
        probs_MJ: torch.Tensor,
        row_map: RowMap,
        of_part: Matrices | None = None,
    ) -> torch.Tensor:
        assert of_part is None  # one FP8 layer holds the scales of all experts
        row_map, rows_L = aligned_rows(row_map, self.fp8.config.multiple)
        x_ND = self.ops.permute(x_MD, row_map)
        probs_N = probs_of_rows(probs_MJ, row_map)
        with self.fp8.layer_region():
            gate_up_N2F = self._gate_up(x_ND, self.w_gate_up_LD2F.flatten(2), rows_L)
            gate_NF, up_NF = gate_up_N2F.chunk(2, dim=1)
            h_NF = self.ops.swiglu(gate_NF, up_NF, probs_N)
            y_ND = self._out(h_NF, self.w_out_LFD, rows_L)
        return self.ops.unpermute(y_ND, row_map)


class Fp8LowRankExperts(LowRankExperts):
    """E_i(x) = (SiLU(C W_up) * (x W_p)) W_o with these three products in FP8, but not C = x W_down.

    C W_up is kept for the backward pass; `recompute_gate` has no effect.
    """

    def __init__(self, fp8: Fp8Engine, *arguments: Any, **options: Any) -> None:
        """`arguments`, `options`: those of LowRankExperts."""
        super().__init__(*arguments, **options)
        self.fp8 = fp8
        experts, r, w = self.w_up_LRW.shape
        d = self.w_p_LDW.size(1)
        self._up = fp8.grouped_linear(experts, r, w)
        self._p = fp8.grouped_linear(experts, d, w)
        self._out = fp8.grouped_linear(experts, w, d)

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
        assert of_part is None  # one FP8 layer holds the scales of all experts
        assert norms_MJ is None  # AutonomousLayer differentiates the norms itself
        row_map, rows_L = aligned_rows(row_map, self.fp8.config.multiple)
        x_ND = self.ops.permute(x_MD, row_map)
        probs_N = probs_of_rows(probs_MJ, row_map)
        if c_MJR is None:
            c_NR = self.ops.grouped_gemm(x_ND, w_down_LDR, row_map.counts_E)
        else:
            c_NR = self.ops.permute(c_MJR.flatten(0, 1), rows_of_choices(row_map))
        with self.fp8.layer_region():
            g_NW = self._up(c_NR, self.w_up_LRW, rows_L)
            h_NW = self.ops.swiglu(g_NW, self._p(x_ND, self.w_p_LDW, rows_L), probs_N)
            y_ND = self._out(h_NW, self.w_out_LWD, rows_L)
        return self.ops.unpermute(y_ND, row_map)
