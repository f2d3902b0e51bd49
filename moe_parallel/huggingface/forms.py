"""How tensors of transformers become one of ours, and back, to the bit.

A form only reorders and pads: `join` and `split` are inverse, except that `split` drops padding.
Shape suffixes: D model width, F inner width, G key/value heads, Q queries per key/value head, C
width of a head, X any axes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class Form(Protocol):
    """Tensors of transformers to a part of one of our tensors, and back."""

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Theirs to ours."""

    def split(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Ours to theirs, contiguous."""


@dataclass(frozen=True)
class Same:
    """One tensor, unchanged."""

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        (tensor,) = tensors
        return tensor

    def split(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [part.contiguous()]


@dataclass(frozen=True)
class PaddedRows:
    """A matrix [V, D], padded with zero rows."""

    rows: int  # V
    padded: int

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        (tensor,) = tensors
        return F.pad(tensor, (0, 0, 0, self.padded - self.rows))

    def split(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [part[: self.rows].contiguous()]


@dataclass(frozen=True)
class Interleaved:
    """Queries, keys and values, [G * Q * C, X] and twice [G * C, X], by key/value head.

    Megatron-Core's order is: the queries of a key/value head, its key, its value; then the next.
    """

    groups: int
    queries: int  # per key/value head
    width: int  # C

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        by_group = [tensor.unflatten(0, (self.groups, -1)) for tensor in tensors]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(self, part: torch.Tensor) -> list[torch.Tensor]:
        sizes = [self.queries * self.width, self.width, self.width]
        by_group = part.unflatten(0, (self.groups, -1)).split(sizes, dim=1)
        return [tensor.flatten(0, 1).contiguous() for tensor in by_group]


@dataclass(frozen=True)
class Halves:
    """The gate's and the other matrix of a dense SwiGLU layer, both [F, D], one above the other."""

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tensors)

    def split(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [half.contiguous() for half in part.chunk(2)]


@dataclass(frozen=True)
class ExpertHalves:
    """The same two matrices of one expert, as [1, D, 2, F]."""

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([tensor.T for tensor in tensors], dim=1)[None]

    def split(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [half_DF.T.contiguous() for half_DF in part[0].unbind(1)]


@dataclass(frozen=True)
class ExpertOut:
    """The last matrix of one expert, [D, F], as [1, F, D]."""

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        (tensor,) = tensors
        return tensor.T[None].contiguous()

    def split(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [part[0].T.contiguous()]
