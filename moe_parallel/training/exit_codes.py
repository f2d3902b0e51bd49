"""The program's exit codes, for launchers, batch systems and scripts. 0: finished."""

from __future__ import annotations

import os
import signal
import sys

from moe_parallel.training.signals import Stopped

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
