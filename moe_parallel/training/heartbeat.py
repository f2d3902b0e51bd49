"""The heartbeat of a rank, and the rank to blame if nothing goes on.

Every rank sends to the job's store what it does. Rank 0 and the last rank look at all beats, so
that one is left if a host is lost. Progress is a change of phase. In what may last long (the
set-up, a save, the report, and a first iteration, which builds what others reuse) it is also work
of the process: computing, or reading and writing files.

All ranks stop soon after one of them, because each waits in a collective for the others. The rank
to blame is therefore one that is silent (its process is stopped, its host or network is gone, or
native code holds its interpreter), else one that is not in a collective, else any. If there are
several, it is the one furthest behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist

from moe_parallel.telemetry.progress import Phase, Progress
from moe_parallel.training.checkpoint.saving import WRITER
from moe_parallel.training.failure import FailureChannel, end_job, leave, tell
from moe_parallel.training.signals import EXIT_LOST

_BEATS, _LONGEST_PERIOD = 20, 5.0  # beats in a timeout; at most so many seconds between two
_LONG = (Phase.SET_UP, Phase.LOG, Phase.SAVE, Phase.REPORT)
# Of one core, and read or written between two beats: above what heartbeat and gauges read.
_WORKING, _WORKING_BYTES = 0.1, 1 << 20

#: Where Python is while a rank waits in a collective: ends of file names.
_COLLECTIVES = (
    os.path.join("torch", "distributed", "distributed_c10d.py"),
    os.path.join("megatron", "core", "pipeline_parallel", "p2p_communication.py"),
    os.path.join("megatron", "core", "distributed", "param_and_grad_buffer.py"),
    # On a GPU a collective returns at once, and the host waits where it reads the result.
    os.path.join("moe_parallel", "ops", "types.py"),
)


class Beat(NamedTuple):
    """What a rank says about itself."""

    number: int  # of the beat
    who: str  # `rank 1 on node7 (process 4711)`
    place: str  # `forward of iteration 5`
    # The iteration, the changes of phase in it, and a number that grows while a long phase works.
    reached: Sequence[int]
    waits: bool  # in a collective
    stack: str  # of Python, once there has been no progress for a while


class Sighting(NamedTuple):
    """The last beat of a rank, as another rank saw it."""

    beat: Beat
    silent: float  # seconds since it came
    idle: float  # seconds since a beat that showed progress


def blame(sightings: Sequence[Sighting], timeout: float) -> str | None:
    """The message about the rank to blame, if no rank has made progress for `timeout` seconds."""
    if min(each.idle for each in sightings) < timeout:
        return None
    silent = [each for each in sightings if each.silent >= timeout / 2]
    busy = [each for each in sightings if not each.beat.waits]
    found = min(silent or busy or sightings, key=lambda each: tuple(each.beat.reached[:2]))
    beat, limit = found.beat, f"--hang-timeout {timeout:g}"
    if silent:
        return (
            f"error: {beat.who} is silent for {found.silent:.0f} s, last in {beat.place} "
            f"({limit}): its process is stopped, its host or network is gone, or native code "
            "blocks its interpreter"
        )
    return (
        f"error: {beat.who} hangs in {beat.place}: no rank made progress for {timeout:g} s "
        f"({limit}). Its Python stack, the innermost call last:\n{beat.stack}".rstrip("\n")
    )


@contextlib.contextmanager
def heartbeat(progress: Progress, channel: FailureChannel, timeout: float | None) -> Iterator[None]:
    """Inside this context, the job ends after `timeout` seconds without progress of any rank.

    None: it does not.
    """
    if timeout is None:
        yield
        return
    beats = _Heartbeat(progress, channel, timeout)
    try:
        yield
    finally:
        beats.end()


class _Heartbeat:
    """Sends this rank's beats, looks at those of the others, and ends the job if it hangs."""

    def __init__(self, progress: Progress, channel: FailureChannel, timeout: float) -> None:
        self._progress, self._channel, self._timeout = progress, channel, timeout
        # A separate connection, for the reason given in `FailureChannel`.
        self._store: dist.Store = channel.store.clone()  # type: ignore[attr-defined]  # stubs lack it
        self._period = min(timeout / _BEATS, _LONGEST_PERIOD)
        self._rank = int(os.environ.get("RANK", 0))
        self._world_size = int(os.environ.get("WORLD_SIZE", 1))
        self._process, self._main = psutil.Process(), threading.main_thread().ident or 0
        self._who = f"rank {self._rank} on {socket.gethostname()}"
        self._first_iteration: int | None = None
        self._work, self._used = 0, self._usage()
        self._now, self._last = 0.0, time.monotonic()  # seconds
        self._reached: tuple[tuple[int, ...], float] = (), 0.0  # and since when
        self._seen: dict[int, tuple[Beat, float, float]] = {}  # when heard, when it had progressed
        self._beats = self._answered = 0  # of this rank, and of those the store has
        self._over = threading.Event()
        self._arming = threading.Lock()  # so that nothing prints stacks after `end`
        self._send()  # so that this rank is known, whatever happens to it
        for target in (self._beat, self._watch):
            threading.Thread(target=target, name=f"heart{target.__name__}", daemon=True).start()

    def end(self) -> None:
        with self._arming:
            self._over.set()
            # The thread that watches may never run again if the process is about to exit.
            faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # FailureChannel.watch acts on a lost one
            while not self._over.wait(self._period):
                self._send()
                if self._rank not in (0, self._world_size - 1):
                    continue
                sightings = self._look()
                message = blame(sightings, self._timeout) if sightings else None
                if message is not None and not self._over.is_set():
                    end_job(self._channel, EXIT_LOST, message)

    def _watch(self) -> None:
        """Show the stacks if native code holds the interpreter; leave if the store is silent.

        A thread that needs no interpreter prints the stacks once this rank counts as silent: before
        a message says so. The thread that sends the beats cannot set that one's alarm, because the
        interpreter may be taken while it waits for the store.
        """
        before, periods = -1, 0
        while True:
            with self._arming:
                if self._over.is_set():
                    return
                faulthandler.dump_traceback_later(self._timeout / 2, file=2)
            self._over.wait(self._period)
            periods = periods + 1 if self._answered == before else 0
            before = self._answered
            if periods * self._period > self._timeout + 2 * self._period:
                break
        # Without a store the ranks cannot agree on who prints: one does on every host.
        if self._rank == 1 or os.environ.get("LOCAL_RANK", "0") == "0":
            tell(
                f"error: {self._who} hangs, last in {self._progress.place}: the store of the job "
                f"on {os.environ.get('MASTER_ADDR')} did not answer for {self._timeout:g} s "
                "(--hang-timeout); the process that serves it, rank 0 or its launcher, is stopped, "
                "or its host or network is gone"
            )
        leave(EXIT_LOST)

    def _send(self) -> None:
        now = time.monotonic()
        # Without the time in which this process was stopped, as by Ctrl-Z or a batch system.
        self._now += min(now - self._last, 2 * self._period + 1)
        self._last = now
        self._beats += 1
        self._store.set(_key(self._rank), json.dumps(self._own()))
        self._store.check([_key(self._rank)])  # unlike `set`, this waits for an answer
        self._answered = self._beats

    def _own(self) -> Beat:
        """What this rank says about itself."""
        place = self._progress.place
        frames = sys._current_frames()
        writers = [t.ident for t in threading.enumerate() if t.name.startswith(WRITER)]
        waits = any(
            frames[each].f_code.co_filename.endswith(_COLLECTIVES)
            for each in (self._main, *writers)  # training may wait for a writer, and that for ranks
            if each in frames
        )
        if place.activity is Phase.SET_UP:  # of the run, or of its second stage
            self._first_iteration = None
        elif self._first_iteration is None:
            self._first_iteration = place.iteration
        is_long = place.activity in _LONG or place.iteration == self._first_iteration
        (computed, moved), (computed_before, moved_before) = self._usage(), self._used
        self._used = computed, moved
        works = (
            computed - computed_before >= _WORKING * self._period
            or moved - moved_before >= _WORKING_BYTES
        )
        self._work += works and is_long and not waits
        reached = (place.iteration, place.changes, self._work)
        if reached != self._reached[0]:
            self._reached = reached, self._now
        stack = ""
        if self._now - self._reached[1] > self._timeout / 2:
            # Also of threads of autograd, which Python did not start; the main thread comes last.
            others = {t.ident for t in threading.enumerate()} - {self._main, *writers}
            shown = sorted(frames.keys() - others, key=lambda each: each == self._main)
            stack = "".join("".join(traceback.format_stack(frames[each], 40)) for each in shown)
        who = f"{self._who} (process {self._process.pid})"
        return Beat(self._beats, who, str(place), reached, waits, stack)

    def _usage(self) -> tuple[float, int]:
        """So far the seconds of computing, and the bytes read and written, of this process."""
        moved = 0
        with contextlib.suppress(psutil.Error, AttributeError, OSError):  # not on every system
            used = self._process.io_counters()
            # The bytes are those of devices: those of mapped files are not among the characters.
            moved = used.read_chars + used.write_chars + used.read_bytes + used.write_bytes
        return time.process_time(), moved

    def _look(self) -> list[Sighting]:
        """The beats of all ranks; [] until each has sent one."""
        keys = [_key(rank) for rank in range(self._world_size)]
        if not self._seen and not self._store.check(keys):
            return []
        now = self._now
        for rank, text in enumerate(self._store.multi_get(keys)):
            beat = Beat(*json.loads(text))
            before, heard, progressed = self._seen.get(rank, (beat, now, now))
            if beat.number != before.number:
                heard = now
            if beat.reached != before.reached:
                progressed = now
            self._seen[rank] = beat, heard, progressed
        return [
            Sighting(beat, now - heard, now - progressed)
            for _, (beat, heard, progressed) in sorted(self._seen.items())
        ]


def _key(rank: int) -> str:
    return f"moe_parallel/heartbeat/{rank}"
