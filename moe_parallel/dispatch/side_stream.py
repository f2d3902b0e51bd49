"""Work on a CUDA stream of its own, which computation need not wait for until it uses the results.

Autograd computes the gradient of an operator on the stream of the operator and waits between
streams itself, so the backward pass of such work runs aside, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
