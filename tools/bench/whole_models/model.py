"""A whole model as a contender: the same tokens for all, gradients of every weight, a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from moe_parallel.parallel import Groups
from tools.bench.contender import Contender
from tools.bench.whole_models.sizes import ModelSize


@dataclass(frozen=True, eq=False)
class Terms:
    """What all models of a bench share: sizes, precision, and the tokens with their labels."""

    size: ModelSize
    dtype: torch.dtype
    groups: Groups

    @cached_property
    def tokens_BS(self) -> Tensor:
        return self._ids_BS[:, :-1].contiguous()

    @cached_property
    def labels_BS(self) -> Tensor:
        return self._ids_BS[:, 1:].contiguous()

    @property
    def _ids_BS(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.size.V, (self.size.B, self.size.S + 1), generator=generator)


def contender_of(
    name: str, model: nn.Module, loss: Callable[[], Tensor], step: Callable[[], object]
) -> Contender:
    """`loss` runs the forward pass; `step` is a step of the optimizer on gradients that exist.

    Each model is its own answer: initial weights differ, so losses do.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return Contender(
        name,
        forward=lambda: [loss()],
        leaves=weights,
        weights=frozenset(weights),
        upstream=(torch.ones(()),),
        answer=name,
        step=step,
    )


def number_of_weights(contender: Contender) -> int:
    return sum(weight.numel() for weight in contender.leaves.values())
