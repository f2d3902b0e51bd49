"""Backward passes that have no derivative themselves."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from moe_parallel.errors import InputError

Backward = TypeVar("Backward", bound=Callable[..., Any])


def once_differentiable(backward: Backward) -> Backward:
    """`backward`, which refuses to be differentiated.

    torch's decorator of this name refuses only where a second derivative leads back to the operator
    by its gradient. By its inputs it is silently 0.
    """

    @wraps(backward)
    def once(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True asks for a second derivative, which this operator does not "
                'have: leave it out; AoE and RoutedMoE have one with backend="reference"'
            )
        return backward(*arguments)

    return once  # type: ignore[return-value]
