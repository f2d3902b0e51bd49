"""The rows of one message: what the experts of another rank need of a token, in plain torch.

    [ x | unused | experts | probs ]

x has D elements. The J experts are int16, numbered on the rank that receives the row; -1 is an
empty place. Their probs are in fp32 (fp64 for fp64) in the last bytes, whatever the dtype of x. A
row is a multiple of 16 bytes, so that kernels can read it 16 bytes at a time.

No arithmetic may be done with such rows, or with their gradients, because the bits behind x mean
nothing in its dtype. The receiver computes with views of the rows, without copying x.

Shape suffixes: T tokens, D model width, K rows of each at most, N rows, J experts of a row at most,
W elements of a packed row.
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


def packed_width(x: Tensor, places: int) -> int:
    """W for the tokens `x` with `places` experts each, in elements of x's dtype."""
    prob = sum_dtype(x.dtype).itemsize
    used = x.shape[1] * x.element_size() + _expert_bytes(x.dtype, places) + places * prob
    return math.ceil(used / ALIGNMENT) * ALIGNMENT // x.element_size()


def _expert_bytes(dtype: torch.dtype, places: int) -> int:
    """The bytes of the experts, up to those of the probs, which begin at a multiple of their own
    size."""
    prob = sum_dtype(dtype).itemsize
    return math.ceil(places * torch.int16.itemsize / prob) * prob


def pack_rows(x_TD: Tensor, experts_NJ: Tensor, probs_NJ: Tensor, row_map: RowMap) -> Tensor:
    """packed_NW: row n is the token of slot n, 0 in a padding row, with its experts and probs.

    The gradient of a token is the sum of the gradients of its rows.
    """
    packed_NW: Tensor = _Pack.apply(x_TD, experts_NJ, probs_NJ, row_map)
    return packed_NW


def unpack_rows(packed_NW: Tensor, width: int, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """x_ND, a view of the packed rows, and experts_NJ (int64) and probs_NJ of each row.

    In the backward pass, a gradient of x whose rows are as far apart as those of x becomes the
    packed gradient itself: nothing but the probs' gradient is then copied. So x may be used only by
    operators that allocate its gradient, because the memory between the rows of that gradient is
    written.
    """
    x_ND, experts_NJ, probs_NJ = _Unpack.apply(packed_NW, width, places)
    return x_ND, experts_NJ, probs_NJ


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, experts_NJ: Tensor, probs_NJ: Tensor, row_map: RowMap
    ) -> Tensor:
        slots_N, rows_TK, _ = row_map
        ctx.save_for_backward(rows_TK)
        ctx.width, ctx.places = x_TD.shape[1], probs_NJ.shape[1]
        token_N = slots_N.div(rows_TK.shape[1], rounding_mode="floor")  # -1 stays -1
        packed_NW = x_TD.new_zeros(len(slots_N), packed_width(x_TD, ctx.places))
        packed_NW[:, : ctx.width] = _picked(x_TD, token_N)
        _experts(packed_NW, ctx.places)[:] = experts_NJ
        _probs(packed_NW, ctx.places)[:] = probs_NJ
        return packed_NW

    @staticmethod
    def backward(ctx: Any, dpacked_NW: Tensor) -> tuple[Tensor | None, ...]:
        (rows_TK,) = ctx.saved_tensors
        d = dpacked_NW.contiguous()
        dx_TKD = _picked(d[:, : ctx.width], rows_TK)
        dx_TD = dx_TKD.to(sum_dtype(d.dtype)).sum(1).to(d.dtype)
        return dx_TD, None, _probs(d, ctx.places).clone(), None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed_NW: Tensor, width: int, places: int) -> tuple[Tensor, ...]:
        ctx.packed_width, ctx.places = packed_NW.shape[1], places
        experts_NJ = _experts(packed_NW, places).long()
        ctx.mark_non_differentiable(experts_NJ)
        return packed_NW[:, :width], experts_NJ, _probs(packed_NW, places).clone()

    @staticmethod
    def backward(ctx: Any, dx_ND: Tensor, _: None, dprobs_NJ: Tensor) -> tuple[Tensor, None, None]:
        dpacked_NW = _whole_rows(dx_ND, ctx.packed_width)
        _probs(dpacked_NW, ctx.places)[:] = dprobs_NJ
        return dpacked_NW, None, None


def _picked(values: Tensor, index: Tensor) -> Tensor:
    """The rows of `values` at `index`; zeros where it is -1."""
    return functional.pad(values, (0, 0, 0, 1))[index]


def _probs(packed_NW: Tensor, places: int) -> Tensor:
    """A view of the probs, [N, J]."""
    values = packed_NW.view(sum_dtype(packed_NW.dtype))
    return values[:, values.shape[1] - places :]


def _experts(packed_NW: Tensor, places: int) -> Tensor:
    """A view of the experts, int16 [N, J]."""
    numbers = packed_NW.view(torch.int16)
    behind = places * sum_dtype(packed_NW.dtype).itemsize
    first = numbers.shape[1] - (behind + _expert_bytes(packed_NW.dtype, places)) // 2
    return numbers[:, first : first + places]


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
