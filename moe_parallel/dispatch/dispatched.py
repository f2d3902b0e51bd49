"""What a dispatcher hands to the experts, and what it needs to bring their results home."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from moe_parallel.ops import RowMap
from moe_parallel.selection.choices import Choices

Route = TypeVar("Route")


@dataclass(frozen=True)
class Dispatched(Generic[Route]):
    """Tokens as they came to this rank, and which of its experts take which of them.

    They are not sorted by expert: the experts gather what they need by `row_map` and sum their
    results back into the same order.

    Shape suffixes: M tokens that came, J choices of each, D model width, R low-rank size.
    """

    x_MD: torch.Tensor  # zero where padding traveled
    probs_MJ: torch.Tensor  # fp32; 0 where padding traveled
    row_map: RowMap  # rows of the experts of this rank
    c_MJR: torch.Tensor | None  # C = x W_down of each choice, where it was handed on
    route: Route  # opaque; `combine` of the same dispatcher takes it
    wire_bytes: int  # that this rank sends to others in the forward pass, results included


class Dispatcher(Protocol[Route]):
    """Takes tokens to their experts and results back. Holds no state between the two."""

    takes_c: bool  # whether C of the choices goes with them to the experts; else it is made again

    def dispatch(
        self, x_TD: torch.Tensor, choices: Choices, pad_rows_per_expert: int | None
    ) -> Dispatched[Route]:
        """What the experts of this rank take from the tokens of every rank it serves.

        Args:
            x_TD: tokens of this rank.
            choices: of experts of the whole group.
            pad_rows_per_expert: how many rows each expert has from each rank, padded; None: as many
                as were chosen.
        """
        ...

    def combine(self, y_MD: torch.Tensor, route: Route) -> torch.Tensor:
        """The sum of each token's expert outputs, [T, D] on the token's own rank."""
        ...


def probs_of_rows(probs_TK: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    """The gate of each row, 0 in padding rows: [N]. Gradients flow to probs_TK."""
    slots_N = row_map.slots_N
    probs_N = probs_TK.flatten()[slots_N.clamp(min=0)]
    return torch.where(slots_N >= 0, probs_N, 0.0)


def rows_of_choices(row_map: RowMap) -> RowMap:
    """The map for a tensor that has a row for each choice instead of each token."""
    return row_map._replace(rows_TK=row_map.rows_TK.reshape(-1, 1))
