"""The rows of one message: what an expert on another rank needs of a token, in plain torch.

    [ x | C | unused | prob ]

x has D elements. C = x W_down has R, and is there only if it is sent. The prob is in fp32 (fp64 for
fp64) in the last bytes, whatever the dtype of x. A row is a multiple of 16 bytes, so that kernels
can read it 16 bytes at a time; up to 12 bytes are unused.

No arithmetic may be done with such rows, or with their gradients, because the bits of a prob mean
nothing in the dtype of x. The receiver computes with views of the rows, without copying them.

Shape suffixes: T tokens, D model width, K choices of each, N rows, R low-rank size, W elements of a
packed row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe_parallel.ops.types import RowMap

ALIGNMENT = 16  # bytes


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of probs: fp64 for fp64, fp32 for all others."""
    return torch.promote_types(dtype, torch.float32)


def packed_width(x: Tensor, rank: int) -> int:
    """W for the tokens `x` and C of `rank` elements, in elements of x's dtype."""
    used = (x.shape[1] + rank) * x.element_size() + sum_dtype(x.dtype).itemsize
    return math.ceil(used / ALIGNMENT) * ALIGNMENT // x.element_size()


def pack_rows(
    x_TD: Tensor, probs_TK: Tensor, row_map: RowMap, c_TKR: Tensor | None = None
) -> Tensor:
    """packed_NW: row n is the token, the prob and, if given, C of the choice that fills it.

    They are 0 in a padding row. The gradient of a token is the sum of the gradients of its rows.
    """
    packed_NW: Tensor = _Pack.apply(x_TD, probs_TK, c_TKR, row_map)
    return packed_NW


def unpack_rows(packed_NW: Tensor, width: int, rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """x_ND and c_NR (None if `rank` is 0), which are views of the packed rows, and probs_N.

    In the backward pass, a gradient of x whose rows are as far apart as those of x becomes the
    packed gradient itself: nothing but the probs' gradient, and that of C, is then copied. So x may
    be used only by operators that allocate its gradient, because the memory between the rows of
    that gradient is written.
    """
    x_ND, probs_N, c_NR = _Unpack.apply(packed_NW, width, rank)
    return x_ND, probs_N, c_NR if rank else None


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, probs_TK: Tensor, c_TKR: Tensor | None, row_map: RowMap
    ) -> Tensor:
        slots_N, rows_TK, _ = row_map
        ctx.save_for_backward(rows_TK)
        ctx.width, ctx.rank = x_TD.shape[1], 0 if c_TKR is None else c_TKR.shape[2]
        token_N = slots_N.div(rows_TK.shape[1], rounding_mode="floor")  # -1 stays -1
        packed_NW = x_TD.new_zeros(len(slots_N), packed_width(x_TD, ctx.rank))
        packed_NW[:, : ctx.width] = _picked(x_TD, token_N)
        if c_TKR is not None:
            of_c = slice(ctx.width, ctx.width + ctx.rank)
            packed_NW[:, of_c] = _picked(c_TKR.flatten(0, 1), slots_N)
        _probs(packed_NW)[:] = _picked(probs_TK.flatten()[:, None], slots_N)
        return packed_NW

    @staticmethod
    def backward(ctx: Any, dpacked_NW: Tensor) -> tuple[Tensor | None, ...]:
        (rows_TK,) = ctx.saved_tensors
        d = dpacked_NW.contiguous()
        dx_TKD = _picked(d[:, : ctx.width], rows_TK)
        dx_TD = dx_TKD.to(sum_dtype(d.dtype)).sum(1).to(d.dtype)
        dprobs_TK = _picked(_probs(d), rows_TK)[..., 0]
        dc_TKR = None
        if ctx.rank:
            dc_TKR = _picked(d[:, ctx.width : ctx.width + ctx.rank], rows_TK)
        return dx_TD, dprobs_TK, dc_TKR, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed_NW: Tensor, width: int, rank: int) -> tuple[Tensor, ...]:
        ctx.packed_width, ctx.width, ctx.rank = packed_NW.shape[1], width, rank
        c_NR = packed_NW[:, width : width + rank]
        return packed_NW[:, :width], _probs(packed_NW)[:, 0].clone(), c_NR

    @staticmethod
    def backward(
        ctx: Any, dx_ND: Tensor, dprobs_N: Tensor, dc_NR: Tensor
    ) -> tuple[Tensor, None, None]:
        dpacked_NW = _whole_rows(dx_ND, ctx.packed_width)
        if ctx.rank:
            dpacked_NW[:, ctx.width : ctx.width + ctx.rank] = dc_NR
        _probs(dpacked_NW)[:, 0] = dprobs_N
        return dpacked_NW, None, None


def _picked(values: Tensor, index: Tensor) -> Tensor:
    """The rows of `values` at `index`; zeros where it is -1."""
    return functional.pad(values, (0, 0, 0, 1))[index]


def _probs(packed_NW: Tensor) -> Tensor:
    """A view of the probs, [N, 1]."""
    return packed_NW.view(sum_dtype(packed_NW.dtype))[:, -1:]


def _whole_rows(dx_ND: Tensor, packed_width: int) -> Tensor:
    """Packed rows that begin with dx: the memory around dx if it is there, or else a copy."""
    rows, width = dx_ND.shape
    needed = rows * packed_width * dx_ND.element_size()
    has_gaps = dx_ND.stride() == (packed_width, 1) and dx_ND.storage_offset() == 0
    if has_gaps and dx_ND.untyped_storage().nbytes() >= needed:
        return dx_ND.as_strided((rows, packed_width), (packed_width, 1))
    whole_NW = dx_ND.new_empty(rows, packed_width)
    whole_NW[:, :width] = dx_ND
    return whole_NW
