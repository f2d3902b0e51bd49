"""Megatron-Core's data parallelism, with sums of bf16 gradients that are fast on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

PIECE = 1 << 18  # numbers; their fp32 copy stays in the processor's cache


class DataParallel(DistributedDataParallel):
    """Adds each weight's gradient to its main gradient in pieces, with the same bits.

    To add bf16 to fp32 on a CPU, torch makes an fp32 copy of all that it adds. For the experts of a
    layer these are tens of megabytes in each micro-batch.
    """

    def _make_backward_post_hook(self, param: Any) -> Callable[..., None]:
        then = super()._make_backward_post_hook(param)

        def hook(*unused: Any) -> None:
            if not _is_added_slowly(param):
                then(*unused)
                return
            add_in_pieces(param.main_grad, param.grad)
            param.grad_added_to_main_grad = True
            then(*unused)
            param.grad_added_to_main_grad = False

        return hook


def _is_added_slowly(param: Any) -> bool:
    """Whether Megatron-Core's hook would add a gradient of another type than the sum, on a CPU."""
    return (
        param.grad is not None
        and not param.grad_added_to_main_grad
        and not getattr(param, "zero_out_wgrad", False)
        and param.grad.dtype != param.main_grad.dtype
        and param.grad.device.type == "cpu"
    )


def add_in_pieces(total: Tensor, x: Tensor) -> None:
    """total += x; `total` is contiguous and has the shape of x."""
    pieces = zip(total.view(-1).split(PIECE), x.reshape(-1).split(PIECE), strict=True)
    for piece, of_x in pieces:
        piece += of_x
