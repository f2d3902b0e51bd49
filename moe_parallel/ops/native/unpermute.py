"""Sums rows into their tokens. Differentiable once with probs, any number of times without."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake, fake_like
from moe_parallel.ops.once import once_differentiable
from moe_parallel.ops.reference import accumulation_dtype
from moe_parallel.ops.types import RowMap

_ops = torch.ops.moe_parallel


def unpermute(y_ND: Tensor, row_map: RowMap, probs_TK: Tensor | None = None) -> Tensor:
    if probs_TK is not None:
        probs_TK = probs_TK.to(accumulation_dtype(y_ND.dtype))
    return _ops.unpermute(y_ND, row_map.slots_N, row_map.rows_TK, probs_TK)


@fake("unpermute")
def _(y: Tensor, rows: Tensor) -> Tensor:
    return y.new_empty(rows.size(0), y.size(1))


fake_like("unpermute_backward", "y", "probs")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, slots, rows, probs = inputs
    ctx.gated = probs is not None
    ctx.save_for_backward(*((y, slots, rows, probs) if ctx.gated else (slots, rows)))


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
    if not ctx.gated:
        return _ops.permute(dout, *ctx.saved_tensors), None, None, None
    dy, dprobs = _gated_backward(ctx, dout)
    return dy, None, None, dprobs


@once_differentiable
def _gated_backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    return _ops.unpermute_backward(dout, *ctx.saved_tensors)


torch.library.register_autograd("moe_parallel::unpermute", _backward, setup_context=_save)
