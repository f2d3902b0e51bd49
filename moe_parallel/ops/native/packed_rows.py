"""The rows of one message in one pass over the tokens; `unpack_rows` is plain torch."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake
from moe_parallel.ops.once import once_differentiable
from moe_parallel.ops.packed_rows import packed_width, places_of, sum_dtype
from moe_parallel.ops.types import RowMap

_ops = torch.ops.moe_parallel


def visits(numbers_TC: Tensor, experts_there: int, destinations: int) -> tuple[Tensor, Tensor]:
    visited_TC, counts_DX = _ops.visits(numbers_TC, experts_there, destinations)
    return visited_TC, counts_DX


def pack_rows(
    x_TD: Tensor, probs_TK: Tensor, numbers_TC: Tensor, row_map: RowMap, experts_there: int
) -> Tensor:
    places = places_of(probs_TK.shape[1], experts_there)
    slots_N, rows_TC, _ = row_map
    width = packed_width(x_TD, places)
    return _ops.pack_rows(
        x_TD, probs_TK, numbers_TC, slots_N, rows_TC, experts_there, places, width
    )


@fake("visits")
def _(numbers: Tensor, destinations: int) -> tuple[Tensor, Tensor]:
    return numbers.new_empty(numbers.shape), numbers.new_empty(destinations, 2)


@fake("pack_rows")
def _(x: Tensor, slots: Tensor, width: int) -> Tensor:
    return x.new_empty(slots.size(0), width)


@fake("pack_rows_backward")
def _(dpacked: Tensor, rows: Tensor, token_width: int, num_probs: int) -> tuple[Tensor, ...]:
    return (
        dpacked.new_empty(rows.size(0), token_width),
        dpacked.new_empty(rows.size(0), num_probs, dtype=sum_dtype(dpacked.dtype)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, probs, numbers, slots, rows, ctx.experts_there, ctx.places, _ = inputs
    ctx.save_for_backward(numbers, slots, rows)
    ctx.sizes = x.size(1), probs.size(1)


@once_differentiable
def _backward(ctx: Any, dpacked: Tensor) -> tuple[Tensor | None, ...]:
    dx, dprobs = _ops.pack_rows_backward(
        dpacked, *ctx.saved_tensors, *ctx.sizes, ctx.experts_there, ctx.places
    )
    return dx, dprobs, *(None,) * 6


def rows_like(x: Tensor) -> Tensor:
    """For fake kernels: a matrix of the shape of x, whose rows are as far apart as those of x."""
    is_dense = x.size(1) <= 1 or x.stride(1) == 1
    apart = max(x.stride(0), x.size(1)) if is_dense else x.size(1)
    return x.new_empty(x.size(0), apart)[:, : x.size(1)]


torch.library.register_autograd("moe_parallel::pack_rows", _backward, setup_context=_save)
