"""A product of two matrices, or of pairs of matrices, without a gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_parallel.ops.native.fake import fake_like

_ops = torch.ops.moe_parallel


def product(
    a_NI: Tensor, b_IO: Tensor, out_NO: Tensor | None = None, *, accumulate: bool = False
) -> Tensor:
    a_NI, b_IO = a_NI.detach(), b_IO.detach()
    if out_NO is None:
        out_NO = a_NI.new_empty(*a_NI.shape[:-1], b_IO.shape[-1])
    _ops.product(out_NO, a_NI, b_IO, accumulate)
    return out_NO


fake_like("product")


@register_flop_formula(torch.ops.moe_parallel.product)
def _flops(out: torch.Size, a: torch.Size, *_: Any, **__: Any) -> int:
    """Of these shapes, for torch's FlopCounterMode."""
    return 2 * out.numel() * a[-1]
