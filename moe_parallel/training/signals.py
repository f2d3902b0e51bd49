"""The program's exit codes, for launchers and scripts, and the signals that ask it to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

#: The exit codes; 0: finished.
EXIT_FAILED = 1  # a bug: a traceback is printed
EXIT_BAD_INPUT = 2  # a wrong flag, file or value: one line is printed
EXIT_DIVERGED = 3  # the loss became NaN or infinite
#: A signal or --exit-duration-in-mins: everything is saved, or nothing yet; start it again.
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL
EXIT_LOST = 76  # a rank hangs (--hang-timeout), has not come or is out of reach; start again
EXIT_CTRL_C = 128 + signal.SIGINT  # before training began, or a second Ctrl-C
EXIT_KILLED = 128 + signal.SIGKILL  # a rank was killed; any other signal likewise

#: Codes after which a job is not restarted: it would end the same way, or the user stopped it.
FINAL = (EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_CTRL_C)


def code_of(stopped: Stopped) -> int:
    """The exit code of a process that was stopped by a signal."""
    at_once = stopped.number == signal.SIGINT and not stopped.began
    return EXIT_CTRL_C if at_once else EXIT_INTERRUPTED


def reader_gone() -> int:
    """The exit code if the reader of the output has closed it, as in `--help | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout on exit
    return 128 + signal.SIGPIPE


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

    @contextlib.contextmanager
    def finishing(self, whereabouts: Callable[[], str]) -> Iterator[StopRequest]:
        """Inside this context, signals are only recorded. Training has begun.

        `whereabouts` returns the run's progress as text.
        """
        self._whereabouts = whereabouts
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
