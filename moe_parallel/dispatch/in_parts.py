"""All-to-all in parts that travel while the experts of other parts compute.

The local experts of each rank are divided into C parts, not the tokens: an expert computes all its
rows at once, and its gradients are one product each. A token visits each part of a rank by itself.
Rows are sorted by part, then by rank. This is another numbering of the destinations, so it copies
nothing:

    side stream      dispatch 1 | dispatch 2 | ...        | combine 1 | combine 2 | ...
    current stream                experts 1    experts 2    ...

Part i waits for dispatch i alone, and combine i for part i. All dispatches start before the first
combine, because nothing needs the outputs before the end. Autograd computes the gradient of an
operator on the stream of the operator and waits between streams itself, so the backward pass of
such work runs aside, too.

Shape suffixes: C parts; others as in `all_to_all`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from moe_parallel.dispatch.all_to_all import AllToAllDispatcher, AllToAllRoute, row_bytes
from moe_parallel.dispatch.dispatched import Dispatched
from moe_parallel.selection.choices import Choices


@dataclass(frozen=True)
class Departed:
    """The rows of all parts, which travel or have arrived, and how to return their outputs."""

    parts: Iterator[Dispatched[AllToAllRoute]]  # each waits for its own rows alone
    routes_C: list[AllToAllRoute]
    side: WorkPlace
    wire_bytes: int  # that this rank sends to others in the forward pass, outputs included


class AllToAllInParts(AllToAllDispatcher):
    """Sends rows to the experts of one part after the other; see the module's description."""

    def dispatch_parts(
        self, x_TD: torch.Tensor, choices: Choices, pad_rows_per_expert: int | None
    ) -> Departed:
        """As `dispatch`, but the rows of each part are sent by themselves."""
        packed_NW, routes_C = self._pack(x_TD, choices, pad_rows_per_expert)
        rows_of_parts = packed_NW.split([sum(route.sent_R) for route in routes_C])
        side = work_place_of(x_TD.device)
        sent = [
            side.start(
                partial(self._exchange, received_R=route.received_R, sent_R=route.sent_R), rows
            )
            for route, rows in zip(routes_C, rows_of_parts, strict=True)
        ]
        there, back = row_bytes(packed_NW), row_bytes(x_TD)

        def arrived(sent: Pending, route: AllToAllRoute) -> Dispatched[AllToAllRoute]:
            rows = sent.wait()
            return self._arrived(rows, x_TD, choices, pad_rows_per_expert, route, wire_bytes=0)

        return Departed(
            map(arrived, sent, routes_C),
            routes_C,
            side,
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
        return self.ops.unpermute(y_ND, departed.routes_C[0].row_map)  # of all parts


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
