"""What a dispatcher hands to the experts, and what it needs to bring their results home."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from moe_parallel.ops import RowMap

Route = TypeVar("Route")


@dataclass(frozen=True)
class Dispatched(Generic[Route]):
    """Rows for the experts of this rank, sorted by expert.

    Shape suffixes: N rows, D model width, L experts on this rank.
    """

    x_ND: torch.Tensor  # tokens; zero in padding rows
    gates_N: torch.Tensor  # fp32; 0 in padding rows
    counts_L: torch.Tensor  # int64 on the CPU; rows of each expert, summing to N
    route: Route  # opaque; `combine` of the same dispatcher takes it


class Dispatcher(Protocol[Route]):
    """Takes tokens to their experts and results back. Holds no state between the two."""

    def dispatch(
        self,
        x_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        gates_TK: torch.Tensor,
        rows_per_expert: int | None,
    ) -> Dispatched[Route]:
        """Rows for the experts of this rank from the tokens of every rank it serves.

        Args:
            x_TD: tokens of this rank.
            experts_TK: int64, global expert of each choice; -1: none.
            gates_TK: fp32.
            rows_per_expert: pad each expert's rows from each rank to this number; None: no padding.
        """
        ...

    def combine(self, y_ND: torch.Tensor, route: Route) -> torch.Tensor:
        """The sum of each token's expert outputs, [T, D] on the token's own rank."""
        ...


def gates_of_rows(gates_TK: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    """The gate of each row, 0 in padding rows: [N]. Gradients flow to gates_TK."""
    slots_N = row_map.slots_N
    gates_N = gates_TK.flatten()[slots_N.clamp(min=0)]
    return torch.where(slots_N >= 0, gates_N, 0.0)
