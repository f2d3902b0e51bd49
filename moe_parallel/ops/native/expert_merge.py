"""Experts merged by their weights (Lory)."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake, fake_like
from moe_parallel.ops.once import once_differentiable
from moe_parallel.ops.reference import accumulation_dtype

_ops = torch.ops.moe_parallel


def expert_merge(weights_PE: Tensor, w_EIO: Tensor) -> Tensor:
    return _ops.expert_merge(weights_PE.to(accumulation_dtype(w_EIO.dtype)), w_EIO)


@fake("expert_merge")
def _(weights: Tensor, w: Tensor) -> Tensor:
    return w.new_empty(weights.size(0), w.size(1), w.size(2))


fake_like("expert_merge_backward", "weights", "w")


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@once_differentiable
def _backward(ctx: Any, dmerged: Tensor) -> tuple[Tensor, Tensor]:
    return _ops.expert_merge_backward(dmerged, *ctx.saved_tensors)


torch.library.register_autograd("moe_parallel::expert_merge", _backward, setup_context=_save)
