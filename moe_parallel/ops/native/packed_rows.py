"""The rows of one message in one pass over the tokens; `unpack_rows` is plain torch."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake
from moe_parallel.ops.once import once_differentiable
from moe_parallel.ops.packed_rows import packed_width, sum_dtype
from moe_parallel.ops.types import RowMap

_ops = torch.ops.moe_parallel


def pack_rows(x_TD: Tensor, experts_NJ: Tensor, probs_NJ: Tensor, row_map: RowMap) -> Tensor:
    width = packed_width(x_TD, probs_NJ.shape[1])
    return _ops.pack_rows(x_TD, experts_NJ, probs_NJ, row_map.slots_N, row_map.rows_TK, width)


@fake("pack_rows")
def _(x: Tensor, slots: Tensor, width: int) -> Tensor:
    return x.new_empty(slots.size(0), width)


@fake("pack_rows_backward")
def _(dpacked: Tensor, rows: Tensor, token_width: int, places: int) -> tuple[Tensor, ...]:
    return (
        dpacked.new_empty(rows.size(0), token_width),
        dpacked.new_empty(dpacked.size(0), places, dtype=sum_dtype(dpacked.dtype)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, probs, _, rows, _ = inputs
    ctx.save_for_backward(rows)
    ctx.width, ctx.places = x.size(1), probs.size(1)


@once_differentiable
def _backward(ctx: Any, dpacked: Tensor) -> tuple[Tensor | None, ...]:
    dx, dprobs = _ops.pack_rows_backward(dpacked, *ctx.saved_tensors, ctx.width, ctx.places)
    return dx, None, dprobs, None, None, None


def rows_like(x: Tensor) -> Tensor:
    """For fake kernels: a matrix of the shape of x, whose rows are as far apart as those of x."""
    is_dense = x.size(1) <= 1 or x.stride(1) == 1
    apart = max(x.stride(0), x.size(1)) if is_dense else x.size(1)
    return x.new_empty(x.size(0), apart)[:, : x.size(1)]


torch.library.register_autograd("moe_parallel::pack_rows", _backward, setup_context=_save)
