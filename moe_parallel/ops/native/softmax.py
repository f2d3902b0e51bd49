"""The softmax of logits and the gradient of a loss through it, without a copy of them in fp32."""

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake, fake_like
from moe_parallel.ops.reference import accumulation_dtype

_ops = torch.ops.moe_parallel


def softmax_sums(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    most_R, sums_R = _ops.softmax_sums(logits_RV.detach())
    return most_R, sums_R


def softmax_gradient(logits_RV: Tensor, labels_R: Tensor, most_R: Tensor, sums_R: Tensor) -> None:
    _ops.softmax_gradient(logits_RV.detach(), labels_R, most_R, sums_R)


@fake("softmax_sums")
def _(logits: Tensor) -> tuple[Tensor, Tensor]:
    sums = logits.new_empty(logits.size(0), dtype=accumulation_dtype(logits.dtype))
    return sums, torch.empty_like(sums)


fake_like("softmax_gradient")
