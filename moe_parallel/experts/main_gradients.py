"""Weight gradients that an operator's backward pass adds to Megatron-Core's main gradients.

Megatron-Core's data parallelism holds `weight.main_grad`, the sum over the micro-batches of a step,
in fp32. A hook adds each gradient from autograd to it. A kernel that adds to it directly saves that
pass over memory, the intermediate gradient, and its rounding to the dtype of the weights. The
attribute `grad_added_to_main_grad` makes the hook ignore the gradient from autograd.
"""

from __future__ import annotations

from typing import Any

import torch


class AddsToMainGradients:
    """A module whose backward pass can add weight gradients to `main_grad` of its weights."""

    adds_to_main_gradients = False

    def add_to_main_gradients(self) -> None:
        """From now on, backward passes add to each weight's `main_grad`, made by Megatron-Core."""
        self.adds_to_main_gradients = True

    def with_main_gradient(self, weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`weight` as an operator takes it, and the main gradient to which the operator adds.

        None: it adds to none, and returns the gradient.
        """
        if not (self.adds_to_main_gradients and weight.requires_grad):
            return weight, None
        return gradient_in_main_grad(weight), weight.main_grad


def gradient_in_main_grad(weight: torch.Tensor) -> torch.Tensor:
    """`weight`, for an operator that adds its gradient to `weight.main_grad` and returns none."""
    return _GradientInMainGrad.apply(weight)


class _GradientInMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: None) -> torch.Tensor:
        """A meaningless gradient: the hook must be called, and with overlap it needs a tensor."""
        assert gradients == (None,), "an operator handed a gradient on that it has added already"
        ctx.weight.grad_added_to_main_grad = True
        if getattr(ctx.weight, "zero_out_wgrad", False):  # the hook adds it in this case
            return torch.zeros_like(ctx.weight)
        return torch.empty_like(ctx.weight)
