"""Where a rank is in its run, and how long each phase of a step took.

    with progress.during(Phase.SAVE): ...          # the loop, the engine and the dispatcher
    megatron.timers = Timers(progress)             # Megatron-Core's schedules
    progress.place                                 # another thread reads it at any time

A change of phase assigns one field and reads one clock, so it costs a step nothing. On a GPU the
clock is an event on the current stream, which the host does not wait for: a phase lasts as long as
the device was in it.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch

Item = TypeVar("Item")


class Phase(enum.Enum):
    """What a rank does. The value is its name for users."""

    SET_UP = "set-up"
    STEP = "step"  # what no other phase of a step covers
    DATA = "data"
    FORWARD = "forward"
    DISPATCH = "dispatch"
    PIPELINE = "pipeline"
    BACKWARD = "backward"
    REPLAY = "replay"  # of the graph of both passes
    REDUCE = "reduce"
    OPTIMIZER = "optimizer step"
    LOG = "log"
    SAVE = "save"
    EVALUATE = "evaluate"
    REPORT = "report"


#: The phases of a step in which a rank only exchanges data, so waits for the slowest other rank.
EXCHANGES = (Phase.DISPATCH, Phase.PIPELINE, Phase.REDUCE)


class Place(NamedTuple):
    """The place of a rank in its run. Ranks with the same layers pass the same places in order."""

    iteration: int  # under way, or finished if the activity comes after the step
    changes: int  # of phase since the iteration began
    activity: Phase  # SET_UP, STEP, LOG, SAVE, EVALUATE or REPORT
    phase: Phase  # within the activity

    def __str__(self) -> str:
        """In words: `forward of iteration 5`, or `save after iteration 4`."""
        if self.activity is Phase.STEP:
            return f"{self.phase.value} of iteration {self.iteration}"
        within = "" if self.phase is self.activity else f" ({self.phase.value})"
        after = f" after iteration {self.iteration}" if self.iteration else ""
        return f"{self.activity.value}{within}{after}"


class Clock:
    """The clock of a host, in seconds."""

    def read(self) -> Any:
        return time.perf_counter()

    def seconds(self, before: Any, after: Any) -> float:
        """The time between two readings."""
        return float(after - before)

    def wait_for(self, reading: Any) -> None:
        """Return when the reading has been taken: at once."""


class DeviceClock(Clock):
    """A clock of the current stream of a GPU; the host waits only in `wait_for`."""

    def read(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) / 1e3

    def wait_for(self, reading: Any) -> None:
        reading.synchronize()


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return DeviceClock() if device.type == "cuda" else Clock()


class Progress:
    """The place of this rank, and the times of the phases of its steps."""

    def __init__(self, clock: Clock | None = None) -> None:
        """`clock`: of the device; None: of the host."""
        self.clock = clock or Clock()
        self._at = (0, 0, Phase.SET_UP, Phase.SET_UP)  # of `place`; assigned as a whole
        self.rows = 0  # that the experts of this rank received in the steps since `take`
        self._stack = [Phase.SET_UP]
        self._in_step = False
        self._marks: list[tuple[Phase, Any]] | None = None  # of the step under way, if it is timed
        self._steps: list[list[tuple[Phase, Any]]] = []  # their times are not known yet
        self._times: list[dict[Phase, float]] = []

    @property
    def place(self) -> Place:
        """Where this rank is now. Other threads may read it."""
        return Place(*self._at)

    def begin_step(self, iteration: int) -> None:
        """A step begins; its phases are timed until `end_step`."""
        self._stack, self._in_step = [Phase.STEP], True
        self._at = (iteration, 0, Phase.STEP, Phase.STEP)
        self._marks = [(Phase.STEP, self.clock.read())]

    def received(self, rows: int) -> None:
        """The experts of this rank received `rows`. Outside a step nobody counts them."""
        if self._in_step:
            self.rows += rows

    def end_step(self) -> None:
        """The step is over. Does not wait for the device."""
        assert self._marks is not None
        self._change_to(Phase.LOG)
        self._steps.append(self._marks)
        self._marks, self._in_step = None, False
        while len(self._steps) > 1:  # the host has since waited for a later step's loss
            self._times.append(self._times_of(self._steps.pop(0)))

    def start(self, phase: Phase) -> None:
        self._stack.append(phase)
        self._changed()

    def stop(self) -> None:
        """End the phase that was started last; the one before it goes on."""
        self._stack.pop()
        self._changed()

    @contextlib.contextmanager
    def activity(self, phase: Phase) -> Iterator[None]:
        """Inside this context, `phase` is the activity to which all other phases belong."""
        before, self._stack = self._stack, [phase]
        self._changed()
        try:
            yield
        finally:
            self._stack = before
            self._changed()

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Inside this context, phases are not timed: their kernels are only recorded."""
        marks, self._marks = self._marks, None
        try:
            yield
        finally:
            self._marks = marks

    def during(self, phase: Phase) -> _During:
        """Inside this context, this rank is in `phase`."""
        return _During(self, phase)

    def during_backward(self, phase: Phase, result: torch.Tensor) -> None:
        """The backward pass of the operation that gave `result` will be in `phase`, too."""
        node = result.grad_fn
        if node is not None:
            node.register_prehook(lambda _: self.start(phase))
            node.register_hook(lambda *_: self.stop())

    def through(self, phase: Phase, items: Iterable[Item]) -> Iterator[Item]:
        """The items; this rank is in `phase` while it waits for one."""
        iterator = iter(items)
        while True:
            with self.during(phase):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def take(self) -> tuple[list[dict[Phase, float]], int]:
        """The seconds of each phase for each step since the last call, and the rows received.

        Waits for the device.
        """
        for marks in self._steps:
            self.clock.wait_for(marks[-1][1])
            self._times.append(self._times_of(marks))
        times, rows = self._times, self.rows
        self._steps, self._times, self.rows = [], [], 0
        return times, rows

    def _change_to(self, phase: Phase) -> None:
        self._stack = [phase]
        self._changed()

    def _changed(self) -> None:
        stack, (iteration, changes, _, _) = self._stack, self._at
        phase = stack[-1]
        self._at = (iteration, changes + 1, stack[0], phase)
        if self._marks is not None:
            self._marks.append((phase, self.clock.read()))

    def _times_of(self, marks: list[tuple[Phase, Any]]) -> dict[Phase, float]:
        times = dict.fromkeys(Phase, 0.0)
        for (phase, begin), (_, end) in zip(marks, marks[1:], strict=False):
            times[phase] += self.clock.seconds(begin, end)
        return times


class _During:
    """A context manager; those that generators make cost several times as much."""

    __slots__ = ("_phase", "_progress")

    def __init__(self, progress: Progress, phase: Phase) -> None:
        self._progress, self._phase = progress, phase

    def __enter__(self) -> None:
        self._progress._stack.append(self._phase)
        self._progress._changed()

    def __exit__(self, *error: object) -> None:
        self._progress._stack.pop()
        self._progress._changed()


class Timers:
    """Megatron-Core's `timers`, by which its schedules say what they do, for `Progress`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __call__(self, name: str, log_level: int | None = None) -> SimpleNamespace:
        """A timer. Its `barrier` is ignored: a measurement must not add a collective."""
        phase, progress = _phase(name), self._progress
        if phase is None:
            return SimpleNamespace(
                start=lambda barrier=False: None, stop=lambda barrier=False: None
            )
        return SimpleNamespace(
            start=lambda barrier=False: progress.start(phase),
            stop=lambda barrier=False: progress.stop(),
        )


def _phase(name: str) -> Phase | None:
    """The phase of one of Megatron-Core's timers. None: it encloses others, or says too little."""
    exact = {"forward-compute": Phase.FORWARD, "backward-compute": Phase.BACKWARD}
    if name in exact:
        return exact[name]
    if name.endswith(("-send", "-recv")):
        return Phase.PIPELINE
    if name.endswith(("-grads-sync", "-grads-all-reduce", "-all-gather")):
        return Phase.REDUCE
    return None
