"""What an operator returns of gradients that it adds to main gradients: nothing."""

from collections.abc import Sequence

from torch import Tensor


def own_gradient(w: Tensor, main: Tensor | None) -> Tensor:
    """What the C++ operator returns for `w`, by shape: empty where `main` takes it."""
    return w.new_empty(w.shape if main is None else (0,))


def gradients_not_added(
    gradients: Sequence[Tensor], main_gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """What autograd is told: None where a main gradient has it already."""
    pairs = zip(gradients, main_gradients, strict=True)
    return [gradient if main is None else None for gradient, main in pairs]
