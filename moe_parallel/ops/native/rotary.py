"""Rotary position embeddings: one kernel for queries and keys, which may also split them off."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake, fake_like
from moe_parallel.ops.once import once_differentiable

_ops = torch.ops.moe_parallel


def rotary(q_SBHC: Tensor, k_SBGC: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _ops.rotary(q_SBHC, k_SBGC, angles, False)
    return q, k


fake_like("rotary", "q", "k")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, angles, ctx.inverse = inputs
    ctx.save_for_backward(angles)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    (angles,) = ctx.saved_tensors
    return *_ops.rotary(dq, dk, angles, not ctx.inverse), None, None


torch.library.register_autograd("moe_parallel::rotary", _backward, setup_context=_save)


def split_and_rotate(qkv_SBGX: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _ops.split_and_rotate(qkv_SBGX, angles)
    return q, k, v


@fake("split_and_rotate")
def _(qkv: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width, (length, batch, groups, _) = angles.size(3), qkv.shape
    q = qkv.new_empty(length, batch, (qkv.size(3) // width - 2) * groups, width)
    k, v = (qkv.new_empty(length, batch, groups, width) for _ in range(2))
    return q, k, v


@fake("split_and_rotate_backward")
def _(dq: Tensor, dk: Tensor) -> Tensor:
    length, batch, groups, width = dk.shape
    return dq.new_empty(length, batch, groups, (dq.size(2) // groups + 2) * width)


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[1])


@once_differentiable
def _backward_of_all(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
    return _ops.split_and_rotate_backward(*gradients, *ctx.saved_tensors), None


torch.library.register_autograd(
    "moe_parallel::split_and_rotate", _backward_of_all, setup_context=_save_angles
)
