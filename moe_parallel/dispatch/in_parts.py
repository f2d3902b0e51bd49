"""All-to-all in parts that travel while the experts of other parts compute.

The local experts of each rank are divided into C parts, not the tokens: an expert computes all its
rows at once, and its gradients are one product each. Rows are sorted by part, then by rank, then by
expert. This is another numbering of the experts in the row map, so it copies nothing:

    side stream      dispatch 1 | dispatch 2 | ...        | combine 1 | combine 2 | ...
    current stream                experts 1    experts 2    ...

Part i waits for dispatch i alone, and combine i for part i. All dispatches start before the first
combine, because nothing needs the outputs before the end. A token's outputs are summed in the order
of its choices, as they are without parts: the results are the same bits.

Shape suffixes: C parts, X ranks of experts, R ranks of the group, L experts on this rank, P of them
in a part; others as in `all_to_all`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_parallel.dispatch.all_to_all import AllToAllDispatcher, AllToAllRoute, row_bytes
from moe_parallel.dispatch.dispatched import Dispatched, probs_of_rows, rows_of_choices
from moe_parallel.dispatch.side_stream import Pending, WorkPlace, work_place_of
from moe_parallel.ops import RowMap
from moe_parallel.selection.choices import Choices
from moe_parallel.telemetry.progress import Phase


@dataclass(frozen=True)
class Departed:
    """The rows of all parts, which travel or have arrived, and how to return their outputs."""

    parts: Iterator[Dispatched[AllToAllRoute]]  # each waits for its own rows alone
    routes_C: list[AllToAllRoute]
    side: WorkPlace
    row_map: RowMap  # the rows of this rank's own tokens, by part
    rows: int  # that this rank receives
    wire_bytes: int  # that this rank sends to others in the forward pass, outputs included


class AllToAllInParts(AllToAllDispatcher):
    """Sends rows to the experts of one part after the other; see the module's description."""

    def __init__(self, parts: int, *arguments: Any, **named: Any) -> None:
        """
        Args:
            parts: C, which divides the experts of a rank.
            arguments, named: those of AllToAllDispatcher.
        """
        super().__init__(*arguments, **named)
        assert self._experts_per_rank % parts == 0, (self._experts_per_rank, parts)
        self.parts = parts

    def dispatch_parts(
        self, x_TD: torch.Tensor, choices: Choices, pad_rows_per_expert: int | None
    ) -> Departed:
        """As `dispatch`, but the rows of each part are sent by themselves."""
        row_map = self.ops.routing_map(
            self._by_part(choices.experts_TK),
            self.num_experts,
            pad_rows_per_expert,
            choices.all_chosen,
        )
        routes_C, received_CRP = self._routes(row_map)
        kinds = [self.ops.permute(x_TD, row_map), probs_of_rows(choices.probs_TK, row_map)]
        if choices.c_TKR is not None:
            kinds.append(self.ops.permute(choices.c_TKR.flatten(0, 1), rows_of_choices(row_map)))
        # The rows of a part are sent to `expert_shards` ranks.
        sizes_C = [sum(route.sent_R) // self.expert_shards for route in routes_C]
        side = work_place_of(x_TD.device)
        sent = [
            [side.start(partial(self._to_experts, route=route), rows) for rows in of_part]
            for route, *of_part in zip(
                routes_C, *(rows.split(sizes_C) for rows in kinds), strict=True
            )
        ]
        there = sum(row_bytes(rows) for rows in kinds)
        return Departed(
            map(self._arrived, sent, received_CRP, routes_C),
            routes_C,
            side,
            row_map,
            sum(sum(route.received_R) for route in routes_C),
            sum(self._wire_bytes(route, there, row_bytes(kinds[0])) for route in routes_C),
        )

    def combine_parts(self, outputs: Iterable[torch.Tensor], departed: Departed) -> torch.Tensor:
        """As `combine`. `outputs` yields those of each part; each is returned when it is there."""
        returned = [
            departed.side.start(partial(self._to_tokens, route=route), y_MD)
            for y_MD, route in zip(outputs, departed.routes_C, strict=True)
        ]
        y_ND = torch.cat([each.wait() for each in returned])
        return self.ops.unpermute(y_ND, departed.row_map)

    def _by_part(self, experts_TK: torch.Tensor) -> torch.Tensor:
        """The experts numbered by part, then by rank; -1 stays -1."""
        of_part = self._experts_per_rank // self.parts
        numbers_E = torch.arange(self.num_experts, device=experts_TK.device)
        numbers_E = numbers_E.view(self.parts, -1, of_part).transpose(0, 1).flatten()
        return F.pad(numbers_E, (0, 1), value=-1)[experts_TK]  # -1 is the last entry

    def _routes(self, row_map: RowMap) -> tuple[list[AllToAllRoute], torch.Tensor]:
        """The route of each part, and the rows that each rank sends to the experts here."""
        counts_CXP = row_map.counts_E.view(self.parts, -1, self._experts_per_rank // self.parts)
        sent_RCP = self._for_every_shard(counts_CXP.transpose(0, 1)).contiguous()
        received_RCP = torch.empty_like(sent_RCP)
        with self.progress.during(Phase.DISPATCH):
            dist.all_to_all_single(received_RCP, sent_RCP, group=self.group)
            # Sizes of all parts are read at once.
            sizes = torch.stack([sent_RCP.sum(2).T, received_RCP.sum(2).T]).tolist()
        routes_C = [AllToAllRoute(row_map, *of_part) for of_part in zip(*sizes, strict=True)]
        return routes_C, received_RCP.transpose(0, 1)

    def _arrived(
        self, sent: list[Pending], received_RP: torch.Tensor, route: AllToAllRoute
    ) -> Dispatched[AllToAllRoute]:
        x_MD, probs_M, *c_MR = (each.wait() for each in sent)
        row_map = self._row_map_of_arrivals(received_RP, len(x_MD))
        c_MJR = c_MR[0].unsqueeze(1) if c_MR else None
        return Dispatched(x_MD, probs_M.unsqueeze(1), row_map, c_MJR, route, wire_bytes=0)
