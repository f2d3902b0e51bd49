"""How the program ends, as launchers, batch systems and scripts see it. 0: done."""

from __future__ import annotations

import os
import signal
import sys

from moe_parallel.training.signals import Stopped

EXIT_FAILED = 1  # a bug: a traceback is printed
EXIT_BAD_INPUT = 2  # a wrong flag, file or value: one line is printed
EXIT_DIVERGED = 3  # the loss became NaN or infinite
EXIT_INTERRUPTED = 75  # a signal: all is saved, or nothing yet; start again (EX_TEMPFAIL)
EXIT_CTRL_C = 128 + signal.SIGINT  # before training began, or a second time
EXIT_KILLED = 128 + signal.SIGKILL  # and 128 + any other signal that a rank was lost by

#: What ends a job for good: started again at once, it would end the same way, or nobody wants it.
FINAL = (EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_CTRL_C)


def code_of(stopped: Stopped) -> int:
    """The exit code of a process that a signal ends."""
    at_once = stopped.number == signal.SIGINT and not stopped.began
    return EXIT_CTRL_C if at_once else EXIT_INTERRUPTED


def reader_gone() -> int:
    """The exit code where nobody reads what is printed, `--help | head`: they have seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at its end
    return 128 + signal.SIGPIPE
