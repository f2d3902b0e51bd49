"""The dispatchers' interface, what they pass to the experts, and one that passes it on a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from moe_parallel.ops import Ops, RowMap
from moe_parallel.selection.choices import Choices

Route = TypeVar("Route")


@dataclass(frozen=True)
class Dispatched(Generic[Route]):
    """The tokens that this rank received, and the experts of this rank that compute them.

    The tokens are not sorted by expert. The experts gather their rows with `row_map` and sum their
    outputs back into the same order.

    Shape suffixes: M rows received (without dispatch: the tokens of this rank), J choices of each,
    D model width, R low-rank size.
    """

    x_MD: torch.Tensor  # 0 in padding
    probs_MJ: torch.Tensor  # fp32; 0 in padding
    row_map: RowMap  # rows of the experts of this rank
    c_MJR: torch.Tensor | None  # C = x W_down of each choice; None: to be computed again
    route: Route  # opaque; `combine` of the same dispatcher takes it
    wire_bytes: int  # that this rank sends to others in the forward pass, outputs included
    norms_MJ: torch.Tensor | None = None  # of c_MJR, if the experts differentiate them


@dataclass
class RowBudget:
    """Sizes of a layer that do not depend on the choices, so that nothing waits for the device.

    The device counts what a step needs. Who reads it compares it with the sizes, because whatever
    is beyond them is left out.
    """

    counted_3: torch.Tensor  # int64: rows of the experts, in all; in a micro-batch; in a message
    rows: int | None = None  # of the experts of this rank; None: as many as there are choices
    message: int | None = None  # rows to each rank; None: as many as visit it
    counts_rows: bool = False  # whether the number of rows varies in the layer

    @property
    def is_fixed(self) -> bool:
        return self.rows is not None

    @torch.no_grad()
    def of_experts(self, experts_MJ: torch.Tensor) -> int | None:
        """Counts the choices that the experts of this rank compute in a micro-batch, and returns
        their rows. `experts_MJ`: below 0 for no choice."""
        self.counts_rows = True
        number = (experts_MJ >= 0).sum()
        self.counted_3[0] += number
        self.counted_3[1].clamp_(min=number)
        return None if self.rows is None else min(self.rows, experts_MJ.numel())

    @torch.no_grad()
    def of_messages(self, rows_D: torch.Tensor, tokens: int) -> int | None:
        """Counts the rows to each of D ranks, at most `tokens`, and returns those of a message."""
        self.counted_3[2].clamp_(min=rows_D.max())
        return None if self.message is None else min(self.message, tokens)


class Dispatcher(Protocol[Route]):
    """Dispatches tokens to experts and combines the outputs. Holds no state between the two."""

    passes_c: bool  # whether C of the choices, and its norms, are passed to the experts

    def dispatch(
        self,
        x_TD: torch.Tensor,
        choices: Choices,
        pad_rows_per_expert: int | None,
        budget: RowBudget | None = None,
    ) -> Dispatched[Route]:
        """Sends this rank's tokens to their experts and returns the tokens received here.

        Args:
            x_TD: the tokens of this rank.
            choices: their experts, which may be on any rank of the group.
            pad_rows_per_expert: the number of rows to which each rank pads each expert. None: no
                padding.
            budget: counts what is needed, and may fix the sizes. None: the host reads them where
                it does not know them.
        """
        ...

    def combine(self, y_MD: torch.Tensor, route: Route) -> torch.Tensor:
        """Returns the outputs to the tokens' own ranks and sums them per token: [T, D]."""
        ...


def probs_of_rows(probs_TK: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    """The prob of each row, 0 in padding rows: [N]. Gradients flow to probs_TK."""
    slots_N = row_map.slots_N
    probs_N = probs_TK.flatten()[slots_N.clamp(min=0)]
    return torch.where(slots_N >= 0, probs_N, 0.0)


def rows_of_choices(row_map: RowMap) -> RowMap:
    """The row map for a tensor with one row per choice instead of one per token."""
    return row_map._replace(rows_TK=row_map.rows_TK.reshape(-1, 1))


class LocalDispatcher:
    """The dispatcher for a rank that holds all E experts completely."""

    passes_c = True

    def __init__(self, num_experts: int, ops: Ops) -> None:
        self.num_experts = num_experts
        self.ops = ops

    def dispatch(
        self,
        x_TD: torch.Tensor,
        choices: Choices,
        pad_rows_per_expert: int | None,
        budget: RowBudget | None = None,
    ) -> Dispatched[None]:
        max_rows = choices.max_rows
        known = (choices.number, max_rows, pad_rows_per_expert) != (None, None, None)
        if budget is not None and not known:
            max_rows = budget.of_experts(choices.experts_TK)
        row_map = self.ops.routing_map(
            choices.experts_TK,
            self.num_experts,
            pad_rows_per_expert,
            choices.number,
            max_rows,
        )
        return Dispatched(
            x_TD,
            choices.probs_TK,
            row_map,
            choices.c_TKR,
            route=None,
            wire_bytes=0,
            norms_MJ=choices.norms_TK,
        )

    def combine(self, y_MD: torch.Tensor, route: None) -> torch.Tensor:
        return y_MD
