"""CUDA streams without a GPU: what may run before what, and which memory may be used where.

Each stream counts its operators and knows how far it has waited for every other stream. An operator
that uses memory which another stream wrote must have waited for that write and have recorded itself
as a user, because otherwise the allocator may reuse the memory too early.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    """`seen`: how many operators of each stream are over before the next one of this stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: collections.Counter[str] = collections.Counter()

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen

    def record_event(self) -> collections.Counter[str]:
        return self.seen.copy()

    def wait_event(self, event: collections.Counter[str]) -> None:
        self.seen |= event


class Streams(TorchDispatchMode):
    """`current` and `side` stand for CUDA streams while the context is open."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = Stream("main"), Stream("side")
        self.current = self.main
        self.exchanged: list[int] = []  # operators of the side stream when each exchange is over
        self._written: dict[int, tuple[str, int]] = {}  # by memory: the stream and its operator
        self._owner: dict[int, str] = {}
        self._users: set[tuple[int, str]] = set()
        self._alive: list[Any] = []  # so that no memory is reused
        self._patches = ExitStack()

    def __enter__(self) -> Streams:
        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            self._users.add((_memory(tensor), stream.name))

        for where, name, what in (
            (torch.cuda, "current_stream", lambda *_: self.current),
            (torch.cuda, "stream", self._on),
            (torch.Tensor, "record_stream", record_stream),
        ):
            self._patches.enter_context(mock.patch.object(where, name, what))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream, name = self.current, func.name()
        sends = name.startswith("c10d::alltoall")
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        for tensor in given[sends:]:  # the first is the output
            self._check(_memory(tensor), name)
        stream.seen[stream.name] += 1
        result = func(*args, **(kwargs or {}))
        made = (
            given[:1]
            if sends
            else [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        )
        for tensor in made:
            memory = _memory(tensor)
            if sends or memory not in self._owner:
                self._alive.append(tensor)
                self._owner.setdefault(memory, stream.name)
                self._written[memory] = stream.name, stream.seen[stream.name]
        if sends:
            self.exchanged.append(self.side.seen["side"])
        return result

    def _check(self, memory: int, name: str) -> None:
        stream = self.current
        writer, operator = self._written.get(memory, (stream.name, 0))
        assert stream.seen[writer] >= operator, f"{name} on {stream.name} does not wait"
        owner = self._owner.get(memory, stream.name)
        recorded = owner == stream.name or (memory, stream.name) in self._users
        assert recorded, f"{name} on {stream.name} uses memory that it has not recorded"


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
