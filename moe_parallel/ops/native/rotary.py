"""Rotary position embeddings: one kernel for the queries and one for the keys."""

from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.moe_parallel


def rotary(q_SBHC: Tensor, k_SBGC: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _ops.rotary(q_SBHC, k_SBGC, angles, False)
    return q, k


@torch.library.register_fake("moe_parallel::rotary")
def _(q: Tensor, k: Tensor, angles: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, angles, ctx.inverse = inputs
    ctx.save_for_backward(angles)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    (angles,) = ctx.saved_tensors
    return *_ops.rotary(dq, dk, angles, not ctx.inverse), None, None


torch.library.register_autograd("moe_parallel::rotary", _backward, setup_context=_save)
