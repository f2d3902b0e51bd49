"""Copies tokens to their rows. The gradient is `unpermute`, so all orders of gradients exist."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake
from moe_parallel.ops.types import RowMap

_ops = torch.ops.moe_parallel


def permute(x_TD: Tensor, row_map: RowMap) -> Tensor:
    return _ops.permute(x_TD, row_map.slots_N, row_map.rows_TK)


@fake("permute")
def _(x: Tensor, slots: Tensor) -> Tensor:
    return x.new_empty(slots.size(0), x.size(1))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, slots, rows = inputs
    ctx.save_for_backward(slots, rows)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
    return _ops.unpermute(dout, *ctx.saved_tensors, None), None, None


torch.library.register_autograd("moe_parallel::permute", _backward, setup_context=_save)
