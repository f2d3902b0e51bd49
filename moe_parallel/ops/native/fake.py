"""Fake kernels, which give the shapes of an operator's results for tracing.

They name only the arguments that they need. Those of an operator are listed once, in C++.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

Results = Callable[..., Any]


def fake(operator: str) -> Callable[[Results], Results]:
    """Registers a function as an operator's fake kernel; its parameters have the names of C++."""

    def register(results: Results) -> Results:
        _register(operator, tuple(signature(results).parameters), results)
        return results

    return register


def fake_like(operator: str, *arguments: str) -> None:
    """Registers a fake kernel whose results have the shapes of these arguments, in this order."""

    def results(*like: Tensor) -> Any:
        made = tuple(tensor.new_empty(tensor.shape) for tensor in like)
        return made if len(made) > 1 else made[0] if made else None

    _register(operator, arguments, results)


def _register(operator: str, needed: tuple[str, ...], results: Results) -> None:
    schema = getattr(torch.ops.moe_parallel, operator).default._schema
    names = [argument.name for argument in schema.arguments]
    at = [names.index(name) for name in needed]
    torch.library.register_fake(
        f"moe_parallel::{operator}", lambda *given: results(*(given[i] for i in at))
    )
