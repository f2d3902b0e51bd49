"""Signals that ask a program to save and stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
BEFORE_TRAINING = "before training began; there was nothing to save"


def handle_stop_signals(handler: Any) -> dict[signal.Signals, Any]:
    """Set the handler of `STOP_SIGNALS`; returns the handlers before.

    A SIGHUP that is ignored, as under nohup, stays so.
    """
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, handler)
    return before


class Stopped(BaseException):
    """One of `STOP_SIGNALS` came while no step had to be finished. The message is one line.

    It is not an Exception, so that error handlers do not catch it.
    """

    def __init__(self, number: int, began: bool, whereabouts: str) -> None:
        """`began`: whether training had begun."""
        super().__init__(f"stopped by {signal.Signals(number).name} {whereabouts}")
        self.number = number
        self.began = began


class StopRequest:
    """Handles `STOP_SIGNALS` from a program's first line to its last.

    While the training loop is `finishing` its steps, a signal is recorded, and the loop checks for
    it after every step. At all other times Stopped is raised, whose message gives the run's
    progress. Repeated signals change nothing, because launchers pass on what the terminal has
    already sent.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._finishing = False
        self._whereabouts: Callable[[], str] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the signals inside this context."""
        before = handle_stop_signals(self._come)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def in_training(self) -> bool:
        """Whether training has begun."""
        return self._whereabouts is not None

    def began(self, whereabouts: Callable[[], str]) -> None:
        """Training has begun; `whereabouts` returns the run's progress as text."""
        self._whereabouts = whereabouts

    @contextlib.contextmanager
    def finishing(self, whereabouts: Callable[[], str]) -> Iterator[StopRequest]:
        """Inside this context, signals are only recorded. Training has begun."""
        self.began(whereabouts)
        self._finishing = True
        try:
            yield self
        finally:
            self._finishing = False

    def heed(self) -> None:
        """Raise Stopped if a signal was recorded."""
        if self.signal is not None:
            raise self._stopped(self.signal)

    def _come(self, number: int, frame: FrameType | None) -> None:
        repeated = self.signal is not None
        self.signal = number
        if not (self._finishing or repeated):
            raise self._stopped(number)

    def _stopped(self, number: int) -> Stopped:
        if self._whereabouts is None:
            return Stopped(number, False, BEFORE_TRAINING)
        return Stopped(number, True, self._whereabouts())
