"""Gradients that an operator adds to main gradients; it returns nothing for them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def own_gradient(w: Tensor, main: Tensor | None) -> Tensor:
    """A tensor like the one that the C++ operator returns for `w`: empty if `main` is given."""
    return torch.empty_like(w) if main is None else w.new_empty(0)


def gradients_not_added(
    gradients: Sequence[Tensor], main_gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients for autograd: None if the gradient is already in a main gradient."""
    pairs = zip(gradients, main_gradients, strict=True)
    return [gradient if main is None else None for gradient, main in pairs]
