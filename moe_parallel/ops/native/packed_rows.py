"""The rows of one message in one pass over the tokens; `unpack_rows` is plain torch."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake
from moe_parallel.ops.once import once_differentiable
from moe_parallel.ops.packed_rows import packed_width, sum_dtype
from moe_parallel.ops.types import RowMap

_ops = torch.ops.moe_parallel


def pack_rows(
    x_TD: Tensor, probs_TK: Tensor, row_map: RowMap, c_TKR: Tensor | None = None
) -> Tensor:
    width = packed_width(x_TD, 0 if c_TKR is None else c_TKR.shape[2])
    return _ops.pack_rows(x_TD, probs_TK, row_map.slots_N, row_map.rows_TK, c_TKR, width)


@fake("pack_rows")
def _(x: Tensor, slots: Tensor, width: int) -> Tensor:
    return x.new_empty(slots.size(0), width)


@fake("pack_rows_backward")
def _(dpacked: Tensor, rows: Tensor, token_width: int, rank: int) -> tuple[Tensor, ...]:
    return (
        dpacked.new_empty(rows.size(0), token_width),
        dpacked.new_empty(rows.shape, dtype=sum_dtype(dpacked.dtype)),
        dpacked.new_empty(rows.size(0) if rank else 0, rows.size(1), rank),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, slots, rows, c_TKR, _ = inputs
    ctx.save_for_backward(slots, rows)
    ctx.width, ctx.rank = x.size(1), 0 if c_TKR is None else c_TKR.size(2)


@once_differentiable
def _backward(ctx: Any, dpacked: Tensor) -> tuple[Tensor | None, ...]:
    dx, dprobs, dc = _ops.pack_rows_backward(dpacked, *ctx.saved_tensors, ctx.width, ctx.rank)
    return dx, dprobs, None, None, dc if ctx.rank else None, None


def rows_like(x: Tensor) -> Tensor:
    """For fake kernels: a matrix of the shape of x, whose rows are as far apart as those of x."""
    is_dense = x.size(1) <= 1 or x.stride(1) == 1
    apart = max(x.stride(0), x.size(1)) if is_dense else x.size(1)
    return x.new_empty(x.size(0), apart)[:, : x.size(1)]


torch.library.register_autograd("moe_parallel::pack_rows", _backward, setup_context=_save)
