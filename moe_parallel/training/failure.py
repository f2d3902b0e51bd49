"""How the ranks of a job meet in a store, and how the job ends after an error: once, with one
message, on every rank, within seconds.

The rank that fails first claims the job's one error in the store that torchrun (or, without it,
rank 0) serves, prints it and exits. The others see the claim when a collective fails, or when
they look at the store, every half second. They exit silently with the same code. If a rank was
killed and cannot claim its error, our own launcher does so.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from moe_parallel.errors import Busy, InputError, Unmet
from moe_parallel.telemetry.console import ERASE_LINE
from moe_parallel.training.signals import (
    EXIT_BAD_INPUT,
    EXIT_DIVERGED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    Stopped,
    StopRequest,
    code_of,
)

#: Set by our own launcher or a job script: when the job began, in seconds since 1970.
STARTED = "MOE_PARALLEL_STARTED"
#: How long ranks wait for each other; torch's own limit.
MEETING = timedelta(minutes=30)


def join_store(timeout: timedelta = MEETING) -> dist.Store:
    """The store that a launcher or rank 0 serves, or a new store for a single process.

    Launchers that restart the ranks after a failure keep their store. Each start has separate keys
    in it, because the keys of earlier ranks lead to addresses that are no longer served. If rank 0
    serves the store, it waits for the others for `timeout`.

    Raises:
        InputError: the store cannot be reached.
        Unmet: this rank serves the store, and not all others have come in time.
    """
    if "RANK" not in os.environ:  # MASTER_ADDR may be set for other jobs of the same script
        return dist.HashStore()
    try:
        store, _, _ = next(dist.rendezvous("env://", _rank(), _world_size(), timeout=timeout))
    except dist.DistNetworkError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
        raise InputError(
            f"MASTER_ADDR:MASTER_PORT is {place}, where the ranks cannot connect "
            f"({' '.join(str(error).split())[:200]}): choose a host that all reach and a free port"
        ) from error
    except dist.DistStoreError as error:
        raise Unmet(_unmet(str(error))) from error
    return of_this_start(store, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def of_this_start(store: dist.Store, restart: str) -> dist.Store:
    """The part of a launcher's store for the ranks that it has started after so many restarts."""
    return dist.PrefixStore(f"attempt_{restart}", store)


def connect_ranks(
    store: dist.Store, backend: str, timeout: timedelta, limited_by: str = "minutes:"
) -> None:
    """Initialize torch.distributed, whose default group has all ranks of the job. Collective.

    Raises Unmet if the other ranks have not come within `timeout`, which every collective has.
    `limited_by`: the flag that sets it, for the message.
    """
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("groups", store), rank=_rank(),
            world_size=_world_size(), timeout=timeout,
        )  # fmt: skip
    except RuntimeError as error:  # of the store, or of gloo, which connects the ranks
        if re.search("time(d )?out", str(error), re.IGNORECASE) is None:
            raise
        limit = f"{limited_by} {timeout.total_seconds() / 60:.3g}"
        raise Unmet(_unmet(f"{limit}: {error}")) from error


def _unmet(why: str) -> str:
    return (
        f"rank {_rank()} on {socket.gethostname()} has waited in vain for other ranks to start "
        f"({' '.join(why.split())[:200]}): one is slow, stopped, lost with its host, or out of "
        "reach (firewall, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); start again"
    )


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


_CLAIM, _CODE = "moe_parallel/failures", "moe_parallel/exit_code"
_POLL_SECONDS, _GRACE_SECONDS = 0.5, 3.0

# What gloo and NCCL say if a peer's process, host or network is gone. Both raise other errors with
# the same classes.
_LOST = (
    r"(Connection closed by peer|Connection reset by peer|Broken pipe) \[[^\]]+\]",
    r"(Read|Write|Send|Recv) error \[[^\]]+\]:\d+: [\w ]+",
    r"remote process exited or there was a network error",
)


class Diverged(RuntimeError):
    """Training cannot continue. The message is one line."""


class FailureChannel:
    """The job's one error, on which the ranks agree through a store."""

    def __init__(self, store: dist.Store) -> None:
        # A separate connection: a connection that waits for a key, as groups do when they are
        # created, blocks all other requests until it has the key.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # stubs lack it
        self.store = store
        self._code: int | None = None
        self._tells = False  # whether this rank prints the error
        self.gone = False  # whether the store is no longer served

    def claim(self, code: int) -> bool:
        """Whether this rank is the first to fail. If so, it prints, and `code` ends the job."""
        if self._code is not None:
            return False
        try:
            first = self._store.add(_CLAIM, 1) == 1
            if first:
                self._code, self._tells = code, True
                self._store.set(_CODE, str(code))
        except (RuntimeError, OSError):
            self.gone = True
            return True  # a message printed twice is better than none
        return first

    def code_of_others(self) -> int | None:
        """The exit code, if another rank has claimed the error."""
        try:
            if self._code is None and self._store.check([_CODE]):
                self._code = int(self._store.get(_CODE))
        except (RuntimeError, OSError):
            self.gone = True
        return self._code

    def wait_for_others(self) -> None:
        """Give a launcher, which sees a rank die, time to claim the error before this rank."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while self.code_of_others() is None and time.monotonic() < deadline and not self.gone:
            time.sleep(0.05)

    def watch(self) -> None:
        """End this process when another rank fails, even inside a collective that never ends.

        If the store is gone, so is its launcher: SIGKILL ends both ours and torchrun without a
        message to the ranks. These then save and stop as on SIGTERM, instead of training on
        unnoticed.
        """

        def poll() -> None:
            while (code := self.code_of_others()) is None and not self.gone:
                time.sleep(_POLL_SECONDS)
            if self._tells:
                return
            # The main thread can exit by itself; and at the end of a job the store may close first.
            time.sleep(_GRACE_SECONDS)
            if code is None:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                leave(code)

        threading.Thread(target=poll, name="failure-watch", daemon=True).start()


#: The exit code of each error that is told in one line; a class before its bases.
_CODES = {
    Busy: EXIT_INTERRUPTED,
    InputError: EXIT_BAD_INPUT,
    Diverged: EXIT_DIVERGED,
    Unmet: EXIT_LOST,
}


def run(main: Callable[[FailureChannel], int], stop: StopRequest) -> NoReturn:
    """Call `main` when there is a store, then end the process with its exit code or with that of
    the job's error. Raises what `join_store` does.

    For the errors of `_CODES` and a signal one line is printed, for anything else the traceback;
    only the rank that fails first prints. `stop` receives signals while `main` runs. A fault of
    native code, or a mapped file that is cut while it is read, ends the process by a signal, after
    the stack is printed.
    """
    channel = FailureChannel(join_store())
    faulthandler.enable(file=2, all_threads=False)
    try:
        with stop.listening():
            code = main(channel)
    except tuple(_CODES) as error:
        code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
        code = _fail(channel, code, f"error: {error}")
    except Stopped as stopped:
        code = _fail(channel, code_of(stopped), str(stopped))
    except Exception as error:
        code, message = EXIT_FAILED, f"rank {_rank()}: {traceback.format_exc()}"
        if isinstance(error, RuntimeError):  # perhaps of a collective: another rank is gone
            channel.wait_for_others()
            if channel.gone:
                message = "error: the launcher, or the rank that leads the job, is gone"
            elif (lost := lost_connection(error)) is not None:
                # Nobody has claimed this error: a whole node is gone, with its launcher.
                code = EXIT_LOST
                message = f"error: rank {_rank()} on {socket.gethostname()} cannot continue: {lost}"
        code = _fail(channel, code, message)
    leave(code)


def end_job(channel: FailureChannel, code: int, message: str) -> None:
    """End this process and the job from a thread; returns if the job ends for another reason."""
    if channel.code_of_others() is None:
        leave(_fail(channel, code, message))


def lost_connection(error: RuntimeError) -> str | None:
    """The reason, if a collective failed because another rank can no longer be reached."""
    for pattern in _LOST:
        if match := re.search(pattern, str(error)):
            return f"lost the connection to another rank ({match[0].strip()})"
    return None


def _fail(channel: FailureChannel, code: int, message: str) -> int:
    if not channel.claim(code):
        channel.wait_for_others()  # who claims the error sets its code a moment later
        return channel.code_of_others() or code
    # Without a store the ranks cannot agree on who prints. When the launcher is gone, each rank
    # stops by its own watch, or fails because another one has left: rank 0 prints for all.
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    launcher_is_gone = channel.gone and (code == EXIT_INTERRUPTED or launcher_serves)
    if _rank() == 0 or not launcher_is_gone:
        tell(message)
    if _rank() == 0 and not launcher_serves and _world_size() > 1:
        time.sleep(_GRACE_SECONDS)  # this rank serves the store, in which the others find the code
    return code


def tell(message: str) -> None:
    """Print on stderr; on a terminal in the line of the bar, which another process may show."""
    place = ERASE_LINE if sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):  # of a terminal that was closed
        print(place + message, file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End this process, whatever its threads do."""
    # Threads of gloo or NCCL may still wait for ranks that are gone: do not wait for them.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
