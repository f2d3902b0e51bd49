"""Experts merged in parameter space: SwiGLU with theta = sum_i e_i theta_i (Lory, Eq. 2 and 3).

All three matrices are merged. The merge weights e and the sums are in fp32 or wider, and a merged
matrix is rounded once to the dtype of the experts. If all experts are equal, as after a dense
warm-up, the merged expert is therefore equal to them bit for bit, whatever the e.

Memory: merged matrices are computed when they are needed, at most MERGED_AT_ONCE at a time, and
none is kept; the backward pass recomputes them. The layer needs this memory in addition to the
activations of a dense layer. For weights narrower than fp32, the backward pass also needs an fp32
copy of one E-th of the experts' matrix, of its gradient and of those merged matrices; on a GPU of
as much of them as COPIED_ON_GPUS. None of this grows with the number of segments. (The reference
operators copy more. On a processor without products in bf16, merged matrices in bf16 are also
copied to fp32.)

Shape suffixes: P merged experts, T tokens of each, E experts, D model width, F expert width here
(divided by etp), I and O input and output width of a matrix, C merged experts at a time, R rows of
a matrix at a time, N = P * T.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moe_parallel.experts.experts import ExpertParameters
from moe_parallel.ops import Ops
from moe_parallel.ops.once import once_differentiable
from moe_parallel.parallel import Groups
from moe_parallel.platform.device import fast_factors

#: With a larger number, the experts' matrices are read less often, and more memory is needed.
MERGED_AT_ONCE = 8

#: Bytes of a matrix's rows that the backward pass copies to fp32 on a GPU at a time, unless an E-th
#: of the matrix is more. With an E-th the products are small, and launches take most of the time.
COPIED_ON_GPUS = 128 << 20


class MergedExperts(ExpertParameters):
    """All experts, merged before they compute. Names and shapes are those of `SwiGLUExperts`.

    With etp > 1 a rank holds 1/etp of the width F of every expert and merges only that. The ranks
    exchange only activations, whose size does not depend on the number of experts.
    """

    w_gate_up_LD2F: torch.Tensor  # W_g at index 0, W_p at index 1 of the axis of size 2; L = E
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
        assert groups.ep.size() == 1, "merging needs every expert"
        super().__init__(num_experts, groups, dtype)
        self.ops = ops
        self.add_weight("w_gate_up_LD2F", (hidden_size, 2, ffn_hidden_size), sharded_axis=3)
        self.add_weight("w_out_LFD", (ffn_hidden_size, hidden_size), sharded_axis=1)

    def forward(self, x_PTD: torch.Tensor, weights_PE: torch.Tensor) -> torch.Tensor:
        """The output of each merged expert for its tokens: [P, T, D].

        With etp > 1 it is this rank's part of the sum over F. In the backward pass, the gradients
        of `x_PTD` and `weights_PE` are also this rank's parts of sums.

        Args:
            x_PTD: in the dtype of the experts' matrices.
            weights_PE: the weight of each expert in each merge; fp32, or fp64 for fp64 experts.
        """
        (w_in_LDF, w_out_LFD), main = self.matrices(self.w_gate_up_LD2F, self.w_out_LFD)
        main_in_LDF, main_out_LFD = main or (None, None)
        gate_up_PTF = merged_linear(x_PTD, weights_PE, w_in_LDF, self.ops, main_in_LDF)
        h_NF = self.ops.swiglu_halves(gate_up_PTF.flatten(0, 1))
        h_PTF = h_NF.view(*gate_up_PTF.shape[:2], -1)
        return merged_linear(h_PTF, weights_PE, w_out_LFD, self.ops, main_out_LFD)


def merged_linear(
    x_PTI: torch.Tensor,
    weights_PE: torch.Tensor,
    w_EIO: torch.Tensor,
    ops: Ops,
    main_EIO: torch.Tensor | None = None,
) -> torch.Tensor:
    """x_p (sum_i e_pi W_i) for each p: [P, T, O].

    `main_EIO`: the backward pass adds the gradient of w_EIO to it, and returns none.
    """
    return _MergedLinear.apply(x_PTI, weights_PE, w_EIO, ops, main_EIO)


class _MergedLinear(torch.autograd.Function):
    """Keeps its inputs for the backward pass, and no merged matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        x_PTI: torch.Tensor,
        weights_PE: torch.Tensor,
        w_EIO: torch.Tensor,
        ops: Ops,
        main_EIO: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_PTI, weights_PE, w_EIO)
        ctx.ops, ctx.main_EIO = ops, main_EIO
        y_PTO = x_PTI.new_empty(*x_PTI.shape[:2], w_EIO.shape[2])
        for some in _blocks(len(x_PTI), MERGED_AT_ONCE):
            w_CIO = ops.expert_merge(weights_PE[some], w_EIO)
            _multiply(x_PTI[some], w_CIO, y_PTO[some], ops)
        return y_PTO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy_PTO,), (x_PTI, weights_PE, w_EIO) = gradients, ctx.saved_tensors
        dx_PTI = x_PTI.new_empty(x_PTI.shape)
        for some in _blocks(len(x_PTI), MERGED_AT_ONCE):
            w_COI = ctx.ops.expert_merge(weights_PE[some], w_EIO).transpose(1, 2)
            _multiply(dy_PTO[some], w_COI, dx_PTI[some], ctx.ops)
        dweights_PE, dw_EIO = torch.zeros_like(weights_PE), None
        if ctx.main_EIO is None:
            dw_EIO = torch.empty_like(w_EIO)
        given = dy_PTO, x_PTI, weights_PE, w_EIO
        for rows, dw_ERO in _weight_gradients(*given, dweights_PE, ctx.ops):
            if dw_EIO is None:
                ctx.main_EIO[:, rows] += dw_ERO
            else:
                dw_EIO[:, rows] = dw_ERO
        return dx_PTI, dweights_PE, dw_EIO, None, None


def _weight_gradients(
    dy_PTO: torch.Tensor,
    x_PTI: torch.Tensor,
    weights_PE: torch.Tensor,
    w_EIO: torch.Tensor,
    dweights_PE: torch.Tensor,
    ops: Ops,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """With dW_p = x_p^T dy_p: yields dW_i = sum_p e_pi dW_p in blocks of rows, [E, R, O] in the
    dtype of the weights e, and adds de_pi = <W_i, dW_p> to `dweights_PE`."""
    for rows, w_EX in _row_blocks(w_EIO, weights_PE.dtype):
        total_EX = torch.zeros_like(w_EX)
        for some in _blocks(len(x_PTI), MERGED_AT_ONCE):
            x_CRT = x_PTI[some, :, rows].transpose(1, 2)
            d_CRO = ops.product(*fast_factors(x_CRT, dy_PTO[some]))
            d_CX = d_CRO.flatten(1).to(weights_PE.dtype)
            dweights_PE[some].addmm_(d_CX, w_EX.T)
            total_EX.addmm_(weights_PE[some].T, d_CX)
        yield rows, total_EX.unflatten(1, (-1, w_EIO.shape[2]))


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, ops: Ops) -> None:
    """out = a b for each merge."""
    a, b = fast_factors(a, b)
    if a.dtype == out.dtype:
        ops.product(a, b, out)
    else:
        out.copy_(ops.product(a, b))


def _blocks(size: int, block: int) -> Iterator[slice]:
    return (slice(first, min(first + block, size)) for first in range(0, size, block))


def _row_blocks(w_EIO: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields blocks of rows I of all experts, in `dtype`: [E, R * O].

    If the dtype is the same, all rows are one block, and nothing is copied.
    """
    rows_at_once = len(w_EIO[0]) if w_EIO.dtype == dtype else _rows_at_once(w_EIO, dtype)
    for rows in _blocks(len(w_EIO[0]), rows_at_once):
        yield rows, w_EIO[:, rows].to(dtype).flatten(1)


def _rows_at_once(w_EIO: torch.Tensor, dtype: torch.dtype) -> int:
    """As many rows as make one expert's matrix; on a GPU at least COPIED_ON_GPUS bytes of them."""
    experts, width, columns = w_EIO.shape
    least = COPIED_ON_GPUS // (experts * columns * dtype.itemsize) if w_EIO.is_cuda else 0
    return max(-(-width // experts), least)
