"""Requests from outside to save and stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Whether one of `STOP_SIGNALS` came. The training loop looks after every step.

    Repeated signals change nothing: torchrun passes on what the terminal has sent already.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Inside, the signals are noted instead of ending the process."""
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
