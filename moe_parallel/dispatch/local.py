"""Dispatch if every expert is on this rank: no rows are sent."""

from __future__ import annotations

import torch

from moe_parallel.dispatch.dispatched import Dispatched
from moe_parallel.ops import Ops
from moe_parallel.selection.choices import Choices


class LocalDispatcher:
    """The dispatcher for a rank that holds all E experts completely."""

    takes_c = True
    takes_norms = True

    def __init__(self, num_experts: int, ops: Ops) -> None:
        self.num_experts = num_experts
        self.ops = ops

    def dispatch(
        self, x_TD: torch.Tensor, choices: Choices, pad_rows_per_expert: int | None
    ) -> Dispatched[None]:
        row_map = self.ops.routing_map(
            choices.experts_TK, self.num_experts, pad_rows_per_expert, choices.all_chosen
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
