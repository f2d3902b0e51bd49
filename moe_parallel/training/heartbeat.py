"""The heartbeat of a rank, the ranks that watch it, and which rank to blame if nothing goes on.

Every rank sends to the job's store what it does. Rank 0 and the last rank look at all beats, so
that one is left if a host is lost. Progress is a change of phase. In what may last long (the
set-up, a save, the report, and a first iteration, which builds what others reuse) it is also work
of the process: computing, or reading and writing files.

All ranks stop soon after one of them, because each waits in a collective for the others. The rank
to blame is therefore found in this order:

1. a rank that has sent no heartbeat for half of the timeout: its process is stopped, its host or
   network is gone, or native code holds its interpreter;
2. a rank that is not waiting in a collective;
3. if all wait, which is the case if they do not call the same collectives, or if a GPU hangs: any.

If there are several, it is the one that is furthest behind: with the lowest iteration, then with
the fewest changes of phase in it.
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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist

from moe_parallel.telemetry.progress import Phase, Place, Progress
from moe_parallel.training.checkpoint.saving import WRITER
from moe_parallel.training.failure import FailureChannel, end_job, leave, tell
from moe_parallel.training.signals import EXIT_LOST

_NAMED = 8  # ranks in a list


@dataclass(frozen=True)
class Beat:
    """What a rank says about itself."""

    number: int  # of the beat
    host: str
    process: int
    iteration: int
    changes: int  # of phase in this iteration
    place: str  # in words: `forward of iteration 5`
    work: int  # grows while a long phase makes progress
    waits: bool  # in a collective
    stack: str | None = None  # of Python, once there has been no progress for a while

    @property
    def progress(self) -> tuple[int, int, int]:
        """Changes if, and only if, the rank makes progress."""
        return self.iteration, self.changes, self.work

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Beat:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Sighting:
    """The last beat of a rank, as another rank saw it. None: there was none yet."""

    beat: Beat | None
    silent: float  # seconds since the beat
    idle: float  # seconds since a beat that showed progress


def is_hung(sightings: Sequence[Sighting], timeout: float) -> bool:
    """Whether no rank has made progress for `timeout` seconds."""
    return min(each.idle for each in sightings) >= timeout


def blame(sightings: Sequence[Sighting], timeout: float) -> int:
    """The rank to blame for a job that is hung."""
    ranks = range(len(sightings))
    silent = [rank for rank in ranks if _is_silent(sightings[rank], timeout)]
    beats = [seen.beat for seen in sightings]
    busy = [rank for rank, beat in enumerate(beats) if beat is not None and not beat.waits]
    order = [(-1, 0) if beat is None else (beat.iteration, beat.changes) for beat in beats]
    return min(silent or busy or ranks, key=lambda rank: (order[rank], rank))


def message(sightings: Sequence[Sighting], timeout: float) -> str:
    """The message about a job that is hung: its first line, and the stack if there is one."""
    rank = blame(sightings, timeout)
    seen = sightings[rank]
    others = {other: each for other, each in enumerate(sightings) if other != rank}
    limit = f"(--hang-timeout {timeout:g})"
    if seen.beat is None:
        return f"error: rank {rank} has not been heard since the job began {limit}{_rest(others)}"
    who = f"error: rank {rank} on {seen.beat.host} (process {seen.beat.process})"
    if _is_silent(seen, timeout):
        too = _also([other for other, each in others.items() if _is_silent(each, timeout)])
        return (
            f"{who} is silent for {seen.silent:.0f} s, last in {seen.beat.place} {limit}{too}: its "
            "process is stopped, its host or network is gone, or native code blocks its "
            f"interpreter; there is no stack of a silent rank{_rest(others)}"
        )
    hangs = f"{who} hangs in {seen.beat.place}: no rank made progress for {timeout:g} s {limit}"
    if seen.beat.waits:
        hangs += "; every rank waits in a collective, and this one is furthest behind"
    stack = "Its stack did not arrive"
    if seen.beat.stack is not None:
        stack = "Its Python stack, the innermost call last:\n" + seen.beat.stack.rstrip("\n")
    return f"{hangs}{_rest(others)}. {stack}"


def _is_silent(seen: Sighting, timeout: float) -> bool:
    return seen.beat is None or seen.silent >= timeout / 2


def _also(silent: Sequence[int]) -> str:
    """The other silent ranks; of many, as when a large host is lost, the first."""
    if not silent:
        return ""
    more = f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
    return f"; also silent: {', '.join(str(rank) for rank in silent[:_NAMED])}{more}"


def _rest(others: Mapping[int, Sighting]) -> str:
    """Where the other ranks are: the place of most of them."""
    places = Counter(each.beat.place for each in others.values() if each.beat is not None)
    if not places:
        return ""
    place, count = places.most_common(1)[0]
    who = f"{count} of {len(others)} others are" if count < len(others) else "all others are"
    return f"; {who} in {place}"


_BEATS, _LONGEST_PERIOD = 20, 5.0  # beats in a timeout; at most so many seconds between two
_LONG = (Phase.SET_UP, Phase.LOG, Phase.SAVE, Phase.REPORT)
# Of one core, and read or written between two beats: above what heartbeat and gauges read.
_WORKING, _WORKING_BYTES = 0.1, 1 << 20
_STACK_MAX = 40  # calls

#: Where Python is while a rank waits in a collective: ends of file names.
_COLLECTIVES = (
    os.path.join("torch", "distributed", "distributed_c10d.py"),
    os.path.join("megatron", "core", "pipeline_parallel", "p2p_communication.py"),
    os.path.join("megatron", "core", "distributed", "param_and_grad_buffer.py"),
    # On a GPU a collective returns at once, and the host waits where it reads the result.
    os.path.join("moe_parallel", "dispatch", "all_to_all.py"),
)


@contextlib.contextmanager
def heartbeat(
    progress: Progress, store: dist.Store, channel: FailureChannel, timeout: float | None
) -> Iterator[None]:
    """Inside this context, the job ends after `timeout` seconds without progress of any rank.

    None: it does not.
    """
    if timeout is None:
        yield
        return
    rank, world_size = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1)))
    beats = _Beats(store, channel, timeout, _OwnBeat(progress, timeout), rank, world_size)
    beats.begin()
    try:
        yield
    finally:
        beats.end()


class SteadyClock:
    """Seconds, without those in which this process was stopped, as by Ctrl-Z or a batch system."""

    def __init__(self, period: float) -> None:
        """`period`: seconds after which it is read again."""
        self._most = 2 * period + 1
        self._seconds, self._last = 0.0, time.monotonic()

    def read(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._last, self._most)
        self._last = now
        return self._seconds


class _OwnBeat:
    """What this rank says about itself."""

    def __init__(self, progress: Progress, timeout: float) -> None:
        self._progress = progress
        self._patience = timeout / 2  # then the stack is part of the beat
        self._host, self._process = socket.gethostname(), psutil.Process()
        self._main = threading.main_thread().ident or 0
        self._first_iteration: int | None = None
        self._number, self._work = 0, 0
        self._used = self._usage()
        self._idle_from: tuple[tuple[int, int, int], float] = (-1, 0, 0), 0.0

    def make(self, now: float) -> Beat:
        """`now`: seconds of a `SteadyClock`."""
        place = self._progress.place
        waits = _waits(self._main)
        if self._works() and self._is_long(place) and not waits:
            self._work += 1
        self._number += 1
        reached = (place.iteration, place.changes, self._work)
        if reached != self._idle_from[0]:
            self._idle_from = reached, now
        text = _stacks(self._main) if now - self._idle_from[1] > self._patience else None
        return Beat(
            number=self._number,
            host=self._host,
            process=self._process.pid,
            iteration=place.iteration,
            changes=place.changes,
            place=str(place),
            work=self._work,
            waits=waits,
            stack=text,
        )

    def _is_long(self, place: Place) -> bool:
        if place.activity is Phase.SET_UP:  # of the run, or of its second stage
            self._first_iteration = None
        if place.activity is Phase.STEP and self._first_iteration is None:
            self._first_iteration = place.iteration
        first = place.iteration == self._first_iteration or self._first_iteration is None
        return (first and place.activity in (Phase.STEP, Phase.EVALUATE)) or place.activity in _LONG

    def _works(self) -> bool:
        """Whether the process has worked since the last call."""
        before, self._used = self._used, self._usage()
        seconds, computed, moved = (b - a for a, b in zip(before, self._used, strict=True))
        return computed >= _WORKING * seconds or moved >= _WORKING_BYTES

    def _usage(self) -> tuple[float, float, int]:
        """The time, and so far the seconds of computing and the bytes read and written."""
        moved = 0
        with contextlib.suppress(psutil.Error, AttributeError, OSError):  # not on every system
            used = self._process.io_counters()
            # The bytes are those of devices: those of mapped files are not among the characters.
            moved = used.read_chars + used.write_chars + used.read_bytes + used.write_bytes
        return time.monotonic(), time.process_time(), moved


class _Beats:
    """Sends this rank's beats, looks at those of the others, and ends the job if it hangs."""

    def __init__(
        self,
        store: dist.Store,
        channel: FailureChannel,
        timeout: float,
        own: _OwnBeat,
        rank: int,
        world_size: int,
    ) -> None:
        # A separate connection, for the reason given in `FailureChannel`.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # stubs lack it
        self._channel = channel
        self._timeout = timeout
        self._period = min(timeout / _BEATS, _LONGEST_PERIOD)
        self._own = own
        self._rank, self._world_size = rank, world_size
        self._over = threading.Event()
        self._arming = threading.Lock()  # so that nothing prints stacks after `end`
        self._seen: dict[int, tuple[Beat, float, float]] = {}  # when heard, when it had progressed
        self._latest: Beat | None = None  # of this rank
        self._answered = 0  # by the store: the number of this rank's beats

    def begin(self) -> None:
        self._send(0.0)  # so that this rank is known, whatever happens to it
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        watch = threading.Thread(target=self._watch_interpreter, name="gil-watch", daemon=True)
        watch.start()
        if self._world_size > 1:
            threading.Thread(target=self._watch_store, name="store-watch", daemon=True).start()

    def end(self) -> None:
        with self._arming:
            self._over.set()
            # The thread that watches may never run again if the process is about to exit.
            faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> None:
        clock = SteadyClock(self._period)
        with contextlib.suppress(RuntimeError, OSError):  # FailureChannel.watch acts on a lost one
            while not self._over.wait(self._period):
                now = clock.read()
                self._send(now)
                if self._rank in (0, self._world_size - 1):
                    self._judge(self._look(now))

    def _watch_interpreter(self) -> None:
        """If native code keeps Python's threads from going on, show the stacks.

        A thread that needs no interpreter prints them once this rank counts as silent: before a
        message says so. The thread that sends the beats cannot set that one's alarm, because the
        interpreter may be taken while it waits for the store.
        """
        while True:
            with self._arming:
                if self._over.is_set():
                    return
                faulthandler.dump_traceback_later(self._timeout / 2, file=2)
            self._over.wait(self._period)

    def _send(self, now: float) -> None:
        self._latest = self._own.make(now)
        self._store.set(_key(self._rank), self._latest.encode())
        self._answered = self._latest.number

    def _judge(self, sightings: list[Sighting]) -> None:
        if is_hung(sightings, self._timeout) and not self._over.is_set():
            end_job(self._channel, EXIT_LOST, message(sightings, self._timeout))

    def _look(self, now: float) -> list[Sighting]:
        """The beats of all ranks. A rank that has sent none is silent since this one began."""
        ranks = range(self._world_size)
        there = [r for r in ranks if r in self._seen or self._store.check([_key(r)])]
        for rank, text in zip(there, self._store.multi_get(list(map(_key, there))), strict=True):
            beat = Beat.decode(text)
            before, heard, progressed = self._seen.get(rank, (None, now, now))
            if before is not None and beat.number != before.number:
                heard = now
            if before is not None and beat.progress != before.progress:
                progressed = now
            self._seen[rank] = beat, heard, progressed
        seen = (self._seen.get(rank, (None, 0.0, 0.0)) for rank in ranks)
        return [Sighting(beat, now - heard, now - moved) for beat, heard, moved in seen]

    def _watch_store(self) -> None:
        """End this rank if the host that serves the store does not answer, and nothing goes on."""
        clock, patience = SteadyClock(self._period), self._timeout + 2 * self._period
        before, since = -1, 0.0
        while not self._over.wait(self._period):
            now = clock.read()
            if self._answered != before:
                before, since = self._answered, now
            elif now - since > patience and not self._over.is_set():
                self._leave_without_store()

    def _leave_without_store(self) -> None:
        # Without a store the ranks cannot agree on who prints: one does on every host.
        if self._rank == 1 or os.environ.get("LOCAL_RANK", "0") == "0":
            place = "before the first step" if self._latest is None else self._latest.place
            tell(
                f"error: rank {self._rank} on {socket.gethostname()} hangs, last in {place}: the "
                f"store of the job on {os.environ.get('MASTER_ADDR')} did not answer for "
                f"{self._timeout:g} s (--hang-timeout); the process that serves it, rank 0 or its "
                "launcher, is stopped, or its host or network is gone"
            )
        leave(EXIT_LOST)


def _key(rank: int) -> str:
    return f"moe_parallel/heartbeat/{rank}"


def _waits(main: int) -> bool:
    """Whether the main thread waits in a collective, or for a writer that does."""
    frames = sys._current_frames()
    innermost = frames.get(main)
    if _waits_for_writer(innermost):
        return all(_is_in_collective(frames.get(writer)) for writer in _writers())
    return _is_in_collective(innermost)


def _is_in_collective(innermost: FrameType | None) -> bool:
    return innermost is not None and innermost.f_code.co_filename.endswith(_COLLECTIVES)


def _waits_for_writer(innermost: FrameType | None) -> bool:
    """Whether training waits for a checkpoint that another thread writes."""
    while innermost is not None and not innermost.f_code.co_qualname.startswith("Background."):
        innermost = innermost.f_back
    return innermost is not None


def _writers() -> list[int]:
    """The threads that write a checkpoint during training."""
    threads = threading.enumerate()
    return [each.ident for each in threads if each.ident and each.name.startswith(WRITER)]


def _stacks(main: int) -> str:
    """The stack of the main thread, of a writer, and of threads of autograd, which Python did not
    start."""
    ours = {thread.ident for thread in threading.enumerate()} - {main, *_writers()}
    frames = [(ident, f) for ident, f in sys._current_frames().items() if ident not in ours]
    frames.sort(key=lambda each: each[0] == main)
    return "".join("".join(traceback.format_stack(f, _STACK_MAX)) for _, f in frames)
