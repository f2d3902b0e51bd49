"""Expert weights as the right factors of products with the rows of each expert.

The weights are the same in all micro-batches of a step. On a CPU, products in bf16 read them in
another layout, in which every product packs them first. `weights_packed_once` keeps what was packed
for all micro-batches: two more copies of the weights, one for the forward and one for the backward
pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_parallel.experts.parameters import ExpertParameters, split_experts
from moe_parallel.ops import Ops


class RightFactors(NamedTuple):
    """The weights of some experts as the operators on experts take them."""

    matrices: list[torch.Tensor]  # [L, I, O]
    main_gradients: Any  # of each; None: not used
    packed: list[torch.Tensor]  # copies of `Ops.pack_weights`; empty: none


class MultipliesRows(ExpertParameters):
    """Experts that multiply their rows by their weights."""

    ops: Ops
    #: What was packed of each weight; None: nothing is kept.
    _packed: dict[torch.Tensor, list[torch.Tensor]] | None = None

    def right_factors(self, *weights: torch.Tensor) -> RightFactors:
        """The weights as [L, I, O], their main gradients, and their packed copies."""
        matrices, main = self.matrices(*weights)
        packed = [copy for weight in weights for copy in self._packed_copies(weight)]
        return RightFactors(matrices, main, packed)

    def right_factors_of_parts(self, parts: int, *weights: torch.Tensor) -> list[RightFactors]:
        """`right_factors` of each of `parts` parts of the experts. Each has L / parts of them.

        All parts are views of one split. Their gradients are joined once, when all are there.
        """
        if self._packed is not None:
            self.wait_for_weights()
        whole = self.right_factors(*weights)

        def split(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
            splits = [split_experts(each, parts) for each in tensors]
            return [[each[part] for each in splits] for part in range(parts)]

        main: list[Any] = [None] * parts
        if whole.main_gradients is not None:
            main = [tuple(of_part) for of_part in split(whole.main_gradients)]
        of_parts = zip(split(whole.matrices), main, split(whole.packed), strict=True)
        return [RightFactors(*of_part) for of_part in of_parts]

    def _packed_copies(self, weight: torch.Tensor) -> list[torch.Tensor]:
        if self._packed is None:
            return []
        if weight not in self._packed:
            side_by_side = math.prod(weight.shape[2:-1])
            self._packed[weight] = self.ops.pack_weights(weight.flatten(2), side_by_side)
        return self._packed[weight]


@contextmanager
def weights_packed_once(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, experts among the modules pack a weight at its first use, and keep the result.

    Their weights must not change inside.
    """
    experts = [module for module in modules if isinstance(module, MultipliesRows)]
    for each in experts:
        each._packed = {}
    try:
        yield
    finally:
        for each in experts:
            each._packed = None
