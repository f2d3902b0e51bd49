"""A product of two matrices, or of pairs of matrices, without a gradient."""

import torch
from torch import Tensor

_ops = torch.ops.moe_parallel


def product(
    a_NI: Tensor, b_IO: Tensor, out_NO: Tensor | None = None, *, accumulate: bool = False
) -> Tensor:
    a_NI, b_IO = a_NI.detach(), b_IO.detach()
    if out_NO is None:
        out_NO = a_NI.new_empty(*a_NI.shape[:-1], b_IO.shape[-1])
    _ops.product(out_NO, a_NI, b_IO, accumulate)
    return out_NO


@torch.library.register_fake("moe_parallel::product")
def _(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    return None
