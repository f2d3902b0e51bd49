"""All-to-all in parts that travel while the experts of other parts compute.

The local experts of each rank are divided into C parts, not the tokens: an expert computes all its
rows at once, and its gradients are one product each. Rows are sorted by part, then by rank, then by
expert. This is another numbering of the experts in the row map, so it copies nothing:

    side stream      dispatch 1 | dispatch 2 | ...        | combine 1 | combine 2 | ...
    current stream                experts 1    experts 2    ...

Part i waits for dispatch i alone, and combine i for part i. All dispatches start before the first
combine, because nothing needs the outputs before the end. A token's outputs are summed in the order
of its choices, as they are without parts: the results are the same bits. Autograd computes the
gradient of an operator on the stream of the operator and waits between streams itself, so the
backward pass of such work runs aside, too.

Shape suffixes: C parts, R ranks of the group, P experts of a rank in a part; others as in
`all_to_all`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_parallel.dispatch.all_to_all import (
    AllToAllDispatcher,
    AllToAllRoute,
    PackedSizes,
    row_bytes,
)
from moe_parallel.dispatch.dispatched import Dispatched
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
        row_map = self._row_map(choices, pad_rows_per_expert)
        routes_C, received_CRP = self._routes(row_map)
        packed_NW = self._pack(x_TD, choices, row_map)
        rows_of_parts = packed_NW.split([sum(route.sent_R) for route in routes_C])
        side = work_place_of(x_TD.device)
        sent = [
            side.start(
                partial(self._exchange, received_R=route.received_R, sent_R=route.sent_R), rows
            )
            for route, rows in zip(routes_C, rows_of_parts, strict=True)
        ]
        arrived = partial(self._arrived_part, PackedSizes.of(x_TD, choices))
        there, back = row_bytes(packed_NW), row_bytes(x_TD)
        return Departed(
            map(arrived, sent, received_CRP, routes_C),
            routes_C,
            side,
            row_map,
            sum(sum(route.received_R) for route in routes_C),
            sum(self._wire_bytes(route, there, back) for route in routes_C),
        )

    def combine_parts(self, outputs: Iterable[torch.Tensor], departed: Departed) -> torch.Tensor:
        """As `combine`. `outputs` yields those of each part; each is returned when it is there."""
        returned = [
            departed.side.start(
                partial(self._exchange, received_R=route.sent_R, sent_R=route.received_R), y_MD
            )
            for y_MD, route in zip(outputs, departed.routes_C, strict=True)
        ]
        y_ND = torch.cat([each.wait() for each in returned])
        return self.ops.unpermute(y_ND, departed.row_map)

    def _routes(self, row_map: RowMap) -> tuple[list[AllToAllRoute], torch.Tensor]:
        """The route of each part, and the rows that each rank sends to the experts here."""
        counts_CRP = row_map.counts_E.view(self.parts, -1, self._experts_per_rank // self.parts)
        sent_RCP = counts_CRP.transpose(0, 1).contiguous()
        received_RCP = torch.empty_like(sent_RCP)
        with self.progress.during(Phase.DISPATCH):
            dist.all_to_all_single(received_RCP, sent_RCP, group=self.group)
            # Sizes of all parts are read at once.
            counts = torch.stack([sent_RCP.sum(2).T, received_RCP.sum(2).T])
            sizes = self.ops.read_sizes(counts, len(row_map.slots_N))
        routes_C = [AllToAllRoute(row_map, *of_part) for of_part in zip(*sizes, strict=True)]
        return routes_C, received_RCP.transpose(0, 1)

    def _arrived_part(
        self, sizes: PackedSizes, sent: Pending, received_RP: torch.Tensor, route: AllToAllRoute
    ) -> Dispatched[AllToAllRoute]:
        return self._arrived(sent.wait(), sizes, received_RP, route, wire_bytes=0)


#: Takes one tensor and returns one.
Errand = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Pending:
    """The result of work that may still run."""

    result: Tensor
    event: torch.cuda.Event | None = None  # after the work; None: it is over

    def wait(self) -> Tensor:
        """The result, for the current stream: this stream waits for it, the host does not."""
        if self.event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(self.event)
            # Otherwise the allocator would reuse the memory for the stream that allocated it.
            self.result.record_stream(current)
        return self.result


class WorkPlace(Protocol):
    """Where work runs."""

    def start(self, work: Errand, given: Tensor) -> Pending:
        """Starts `work` on a tensor that the current stream computes."""
        ...


class AtOnce:
    """A CPU has no streams."""

    def start(self, work: Errand, given: Tensor) -> Pending:
        return Pending(work(given))


class SideStream:
    """Work runs in order on one stream, beside the current one."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def start(self, work: Errand, given: Tensor) -> Pending:
        self.stream.wait_stream(torch.cuda.current_stream())
        given.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            result = work(given)
            return Pending(result, self.stream.record_event())


@functools.cache
def work_place_of(device: torch.device) -> WorkPlace:
    """One stream for all layers, because the allocator keeps the memory of each stream apart."""
    return SideStream(torch.cuda.Stream(device)) if device.type == "cuda" else AtOnce()
