"""Dispatch where every expert is on this rank: a permutation and its inverse."""

from __future__ import annotations

import torch

from moe_parallel.dispatch.dispatched import Dispatched, gates_of_rows
from moe_parallel.ops import Ops, RowMap


class LocalDispatcher:
    """All E experts are here, whole."""

    def __init__(self, num_experts: int, ops: Ops) -> None:
        self.num_experts = num_experts
        self.ops = ops

    def dispatch(
        self,
        x_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        gates_TK: torch.Tensor,
        rows_per_expert: int | None,
    ) -> Dispatched[RowMap]:
        row_map = self.ops.routing_map(experts_TK, self.num_experts, rows_per_expert)
        x_ND = self.ops.permute(x_TD, row_map)
        return Dispatched(x_ND, gates_of_rows(gates_TK, row_map), row_map.counts_E, row_map)

    def combine(self, y_ND: torch.Tensor, route: RowMap) -> torch.Tensor:
        return self.ops.unpermute(y_ND, route)
