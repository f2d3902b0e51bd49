"""grouped_gemm and grouped_outer: each is the gradient of the other, so both have all orders."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake, fake_like

_ops = torch.ops.moe_parallel


def grouped_gemm(x_NI: Tensor, w_EIO: Tensor, counts_E: Tensor) -> Tensor:
    return _ops.grouped_gemm(x_NI, w_EIO, counts_E)


@fake("grouped_gemm")
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.size(0), w.size(2))


@fake("grouped_outer")
def _(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.size(0), x.size(1), y.size(1))


fake_like("grouped_outer_add")


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_gemm_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w, counts = ctx.saved_tensors
    dx = _ops.grouped_gemm(dy, w.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
    dw = _outer_like(w, x, dy, counts) if ctx.needs_input_grad[1] else None
    return dx, dw, None


def _outer_like(w: Tensor, x: Tensor, dy: Tensor, counts: Tensor) -> Tensor:
    """The gradient of w as w lies in memory; w may be a transposed view."""
    if w.stride(1) == 1 and w.stride(2) != 1:
        return _ops.grouped_outer(dy, x, counts).transpose(1, 2)
    return _ops.grouped_outer(x, dy, counts)


def _grouped_outer_backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, y, counts = ctx.saved_tensors
    dx = _ops.grouped_gemm(y, dw.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
    dy = _ops.grouped_gemm(x, dw, counts) if ctx.needs_input_grad[1] else None
    return dx, dy, None


torch.library.register_autograd(
    "moe_parallel::grouped_gemm", _grouped_gemm_backward, setup_context=_save_inputs
)
torch.library.register_autograd(
    "moe_parallel::grouped_outer", _grouped_outer_backward, setup_context=_save_inputs
)
