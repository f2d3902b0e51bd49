"""The rows of one message: what the experts of another rank need of a token, in plain torch.

    [ x | unused | experts | probs ]

x has D elements. The J experts are int16, numbered at their destination; -1 is an empty place.
Their probs are in fp32 (fp64 for fp64) in the last bytes, whatever the dtype of x. A row is a
multiple of 16 bytes, so that kernels can read it 16 bytes at a time.

No arithmetic may be done with such rows, or with their gradients, because the bits behind x mean
nothing in its dtype. The receiver computes with views of the rows, without copying x.

A destination has L experts: expert number n is expert n mod L of destination n / L. A token visits
a destination once, with the first of its choices there, and takes the others along.

Shape suffixes: T tokens, D model width, K choices of each, C numbers of each (K times the shards of
an expert, which follow each other), L experts of a destination, N rows, J places of a row, W
elements of a packed row.
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


def visits(numbers_TC: Tensor, experts_there: int, destinations: int) -> tuple[Tensor, Tensor]:
    """The destination that each choice is the first of its token to name, int64 [T, C], -1 for all
    other choices; and the tokens that visit each destination and the choices that they have there,
    [destinations, 2].

    numbers_TC: int64; negative: no choice.
    experts_there: L.
    """
    to_TC = numbers_TC.div(experts_there, rounding_mode="floor").clamp(min=-1)
    is_later_TC = (to_TC[:, :, None] == to_TC[:, None, :]).tril(-1).any(2)
    visited_TC = to_TC.masked_fill(is_later_TC, -1)
    counted = [
        torch.bincount(each.flatten() + 1, minlength=destinations + 1)[1:]
        for each in (visited_TC, to_TC)
    ]
    return visited_TC, torch.stack(counted, 1)


def places_of(num_choices: int, experts_there: int) -> int:
    """J, the most choices of a token at one destination."""
    return min(num_choices, experts_there)


def packed_width(x: Tensor, places: int) -> int:
    """W for the tokens `x` with `places` experts each, in elements of x's dtype."""
    prob = sum_dtype(x.dtype).itemsize
    used = x.shape[1] * x.element_size() + _expert_bytes(x.dtype, places) + places * prob
    return math.ceil(used / ALIGNMENT) * ALIGNMENT // x.element_size()


def _expert_bytes(dtype: torch.dtype, places: int) -> int:
    """The bytes of the experts, up to the probs, which begin at a multiple of their own size."""
    prob = sum_dtype(dtype).itemsize
    return math.ceil(places * torch.int16.itemsize / prob) * prob


def pack_rows(
    x_TD: Tensor, probs_TK: Tensor, numbers_TC: Tensor, row_map: RowMap, experts_there: int
) -> Tensor:
    """packed_NW: row n is a visit, of the token and destination of slot n, with the experts and
    probs of all choices that the token has there. Padding rows are 0, without experts.

    The gradient of a token is the sum of the gradients of its rows.

    row_map: of the first result of `visits`.
    """
    choices, slots_N = probs_TK.shape[1], row_map.slots_N
    shards, places = numbers_TC.shape[1] // choices, places_of(choices, experts_there)
    token_N = slots_N.div(numbers_TC.shape[1], rounding_mode="floor")  # -1 stays -1
    numbers_NC = functional.pad(numbers_TC, (0, 0, 0, 1), value=-1)[token_N]
    to_NC = numbers_NC.div(experts_there, rounding_mode="floor")
    to_N = functional.pad(numbers_TC.flatten(), (0, 1))[slots_N] // experts_there
    is_here_NC = (to_NC == to_N[:, None]) & (numbers_NC >= 0)
    place_NC = (is_here_NC.cumsum(1) - 1).where(is_here_NC, places)

    def placed(values_NC: Tensor, empty: int) -> Tensor:
        empty_NJ = values_NC.new_full((len(slots_N), places + 1), empty)
        return empty_NJ.scatter(1, place_NC, values_NC)[:, :places]

    probs_NC = _picked(probs_TK, token_N).repeat_interleave(shards, dim=1)
    experts_NJ = placed(numbers_NC % experts_there, -1)
    packed_NW: Tensor = _Pack.apply(x_TD, experts_NJ, placed(probs_NC, 0), row_map)
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
