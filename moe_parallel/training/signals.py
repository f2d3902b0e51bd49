"""Requests from outside to save and stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
BEFORE_TRAINING = "before training began; there was nothing to save"


class Stopped(BaseException):
    """One of `STOP_SIGNALS` came where nothing has to be finished first. The message is one line.

    No Exception, so that no handler of errors takes it for one.
    """

    def __init__(self, number: int, began: bool, whereabouts: str) -> None:
        """`began`: whether training had begun."""
        super().__init__(f"stopped by {signal.Signals(number).name} {whereabouts}")
        self.number = number
        self.began = began


class StopRequest:
    """What one of `STOP_SIGNALS` does, from a program's first line to its last.

    While the training loop is `finishing` its steps, the signal is noted, and the loop looks after
    every step. Anywhere else Stopped is raised, which tells how far the run had come. Repeated
    signals change nothing: launchers pass on what the terminal has sent already.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._finishing = False
        self._whereabouts: Callable[[], str] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Inside, the signals come here."""
        before = {number: signal.signal(number, self._come) for number in STOP_SIGNALS}
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
        """From here on, `whereabouts` says how far the run has come."""
        self._whereabouts = whereabouts

    @contextlib.contextmanager
    def finishing(self, whereabouts: Callable[[], str]) -> Iterator[StopRequest]:
        """Inside, signals are noted only. Training has `began`."""
        self.began(whereabouts)
        self._finishing = True
        try:
            yield self
        finally:
            self._finishing = False

    def heed(self) -> None:
        """Raise Stopped if a signal was noted."""
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
