"""A whole model as a contender: the same tokens for all, gradients of every weight, a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_parallel.parallel import Groups
from tools.bench.contender import BenchContender
from tools.bench.whole_models.sizes import ModelSize


@dataclass(frozen=True)
class ModelTerms:
    """What all models of a bench share: sizes, precision, device, the tokens and their labels."""

    size: ModelSize
    dtype: torch.dtype
    groups: Groups
    number_of_batches: int = 1
    device: str = "cpu"

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and labels, [B, S] each, in turns: the same for each model."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.size.B, self.size.S + 1)
        batches = []
        for _ in range(self.number_of_batches):
            ids = torch.randint(self.size.V, shape, generator=generator).to(self.device)
            batches.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
        return itertools.cycle(batches)


def contender_of(
    name: str, model: nn.Module, loss: Callable[[], Tensor], step: Callable[[], object]
) -> BenchContender:
    """`loss` runs the forward pass; `step` is a step of the optimizer, which clips its gradients.

    Each model is its own answer: initial weights differ, so losses do.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    device = next(iter(weights.values())).device
    return BenchContender(
        name,
        forward=lambda: [loss()],
        leaves=weights,
        weights=frozenset(weights),
        upstream=(torch.ones((), device=device),),
        answer=name,
        step=step,
        before_step=lambda: _make_gradients(weights.values()),
    )


def _make_gradients(weights: Iterable[Tensor]) -> tuple[()]:
    """Fills gradients, where Megatron-Core or torch looks for them, with a value whose norm every
    step clips."""
    for weight in weights:
        if weight.grad is None and not hasattr(weight, "main_grad"):
            weight.grad = torch.empty_like(weight)
        getattr(weight, "main_grad", weight.grad).fill_(0.1)
    return ()


def number_of_weights(contender: BenchContender) -> int:
    return sum(weight.numel() for weight in contender.leaves.values())
