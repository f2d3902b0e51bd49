"""Ranks for tests of the launcher: `WHAT RANK` names a function of this file that one rank calls.

The ranks use neither torch nor each other, so they start immediately. If one rank fails, the
others end as ranks of the program do when they receive that failure.
"""

import os
import signal
import sys
import time


def say_that_it_waits() -> None:
    # One write: without a buffer, print() writes the line and its end apart, and the ranks share
    # the file.
    sys.stdout.write("a rank waits\n")
    sys.stdout.flush()


def done() -> int:
    return 0


def bad_input() -> int:
    print("error: --flag is 3: it must be 4", file=sys.stderr)
    return 2


def diverge() -> int:
    return 3


def bug() -> int:
    return 1


def die() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def wait() -> int:
    """Wait for a signal; on this signal the program saves."""
    asked = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.append(None))
    say_that_it_waits()
    while not asked:
        time.sleep(0.01)
    return 75


def hang() -> int:
    """Wait forever, as if saving never finished."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    say_that_it_waits()
    while True:
        time.sleep(1)


def not_yet() -> int:
    """Act as a rank that does not handle signals yet."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    say_that_it_waits()
    while True:
        time.sleep(1)


OTHERS = {"bad_input": 2, "diverge": 3, "bug": 1, "die": 137}


def main(what: str, rank: int) -> int:
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0:
        return 0
    if what in OTHERS and int(os.environ["RANK"]) != rank:
        time.sleep(1)  # within half a second a rank sees that another rank has failed
        return OTHERS[what]
    return int(globals()[what]())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
