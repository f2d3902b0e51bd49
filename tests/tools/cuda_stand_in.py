"""The parts of torch.cuda that the clock of a GPU uses, without a GPU. A work calls `launch` and
`wait`. Time passes only by launches, so it shows what lies between two events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

LAUNCH, REPLAY = 1.0, 0.25  # milliseconds of a kernel


class Device:
    """`log`: everything that the device did, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.clock = 0.0
        self.debug: Any = 0
        self.capturing: Graph | None = None

    def launch(self, kernel: str, milliseconds: float = LAUNCH) -> None:
        if self.capturing is not None:
            self.capturing.kernels.append(kernel)
            return
        self.log.append(kernel)
        self.clock += milliseconds

    def wait(self) -> None:
        """What .item() and .tolist() do."""
        if self.debug == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    def torch_cuda(self) -> SimpleNamespace:
        @contextmanager
        def on_stream(stream: object) -> Iterator[None]:
            yield

        @contextmanager
        def graph(to: Graph, pool: object = None) -> Iterator[None]:
            to.shares = pool
            self.capturing = to
            try:
                yield
            finally:
                self.capturing = None

        def set_mode(mode: object) -> None:
            self.debug = mode

        return SimpleNamespace(
            CUDAGraph=lambda: Graph(self),
            Event=lambda enable_timing: Event(self),
            Stream=Stream,
            current_stream=Stream,
            empty_cache=lambda: None,
            graph=graph,
            get_sync_debug_mode=lambda: self.debug,
            set_sync_debug_mode=set_mode,
            stream=on_stream,
        )


class Graph:
    def __init__(self, device: Device) -> None:
        self.device, self.kernels = device, list[str]()
        self.shares: object = None

    def pool(self) -> object:
        return self

    def replay(self) -> None:
        for kernel in self.kernels:
            self.device.launch(f"{kernel} again", REPLAY)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.device.log.append("event")
        self.at = self.device.clock

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass
