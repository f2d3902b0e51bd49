"""How a job ends when something goes wrong: once, with one message, on every rank, in seconds.

The rank that fails first claims the job's one error in the store that torchrun (or, without it,
rank 0) serves, prints it and leaves. The others see the claim, either when a collective breaks
under them or by a look at the store every half second, and leave silently with the same code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from moe_parallel.errors import InputError

EXIT_FAILED = 1  # a bug, or a lost rank: a traceback is printed
EXIT_BAD_INPUT = 2  # a wrong flag, file or value: one line is printed
EXIT_DIVERGED = 3  # the loss became NaN or infinite
EXIT_INTERRUPTED = 75  # SIGTERM or SIGUSR1: saved, start again to go on (EX_TEMPFAIL)

_CLAIM, _CODE = "moe_parallel/failures", "moe_parallel/exit_code"
_POLL_SECONDS, _GRACE_SECONDS = 0.5, 3.0


class Diverged(RuntimeError):
    """Training cannot go on. The message is one line."""


class FailureChannel:
    """The job's one error, agreed on through a store."""

    def __init__(self, store: dist.Store) -> None:
        # A connection of its own: one that waits for a key, as groups do when they are made, lets
        # nobody else ask until it has it.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # stubs lack it

    def claim(self, code: int) -> bool:
        """Whether this rank is the first to fail; if so, it tells, and `code` ends the job."""
        try:
            first = self._store.add(_CLAIM, 1) == 1
            if first:
                self._store.set(_CODE, str(code))
        except (RuntimeError, OSError):
            return True  # nobody serves the store any more: better told twice than never
        return first

    def code_of_others(self) -> int | None:
        """The exit code, once another rank has claimed the error."""
        try:
            return self._read_code()
        except (RuntimeError, OSError):
            return None

    def watch(self) -> None:
        """End this process when another rank fails, even inside a collective that never ends.

        When the store is gone, so is torchrun: SIGKILL ends it without a word to its ranks, and so
        does SIGUSR1. The ranks then stop as on SIGTERM, saved, instead of training on unseen.
        """

        def poll() -> None:
            try:
                while (code := self._read_code()) is None:
                    time.sleep(_POLL_SECONDS)
            except (RuntimeError, OSError):
                time.sleep(_GRACE_SECONDS)  # at the end of a job the store may go first
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(_GRACE_SECONDS)  # for the main thread to leave by itself
            _leave(code)

        threading.Thread(target=poll, name="failure-watch", daemon=True).start()

    def _read_code(self) -> int | None:
        return int(self._store.get(_CODE)) if self._store.check([_CODE]) else None


def run(main: Callable[[FailureChannel], int], channel: FailureChannel) -> None:
    """Call `main`, then end the process with its exit code, or with that of the job's error.

    InputError and Diverged print their line, anything else its traceback; in either case on the
    rank that fails first only.
    """
    try:
        code = main(channel)
    except InputError as error:
        code = _fail(channel, EXIT_BAD_INPUT, f"error: {error}")
    except Diverged as error:
        code = _fail(channel, EXIT_DIVERGED, f"error: {error}")
    except KeyboardInterrupt:
        code = _fail(channel, 130, "interrupted before training began; nothing was saved")
    except Exception:
        code = _fail(channel, EXIT_FAILED, f"rank {_rank()}: {traceback.format_exc()}")
    _leave(code)


def _fail(channel: FailureChannel, code: int, message: str) -> int:
    if channel.claim(code):
        print(message, file=sys.stderr, flush=True)
        return code
    return channel.code_of_others() or code


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _leave(code: int) -> None:
    # Threads of gloo or NCCL may still wait for peers that are gone: do not wait for them.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
