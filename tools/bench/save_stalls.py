"""How long training stands still for a checkpoint: what is recorded during a run, and the table."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

GOAL = 0.05  # of a synchronous save's stall


@dataclass
class Save:
    """A checkpoint, in seconds of the rank that took longest."""

    is_async: bool
    call: float = 0.0  # of the trainer's call, with the flush of the logs
    flush: float = 0.0
    wait: float = 0.0  # of the next update, for the copy

    @property
    def stall(self) -> float:
        """The time for which training stood still, without the flush that both kinds have."""
        return self.call - self.flush + self.wait


@dataclass
class SaveTimes:
    """What this rank has seen."""

    saves: list[Save] = field(default_factory=list)
    steps: list[tuple[float, bool]] = field(default_factory=list)  # seconds; during a write?

    @staticmethod
    def slowest(ranks: Sequence[SaveTimes]) -> SaveTimes:
        """Of all ranks: of each number the largest."""
        saves = [
            Save(
                mine[0].is_async,
                max(each.call for each in mine),
                max(each.flush for each in mine),
                max(each.wait for each in mine),
            )
            for mine in zip(*(rank.saves for rank in ranks), strict=True)
        ]
        steps = [
            (max(seconds for seconds, _ in mine), any(writing for _, writing in mine))
            for mine in zip(*(rank.steps for rank in ranks), strict=True)
        ]
        return SaveTimes(saves, steps)


@contextlib.contextmanager
def recording() -> Iterator[SaveTimes]:
    """Inside this context a run's periodic saves are synchronous and asynchronous in turns.

    The run needs --async-save. Before each of them the one before is finished, which is not timed.
    """
    from moe_parallel.telemetry.sinks import Telemetry
    from moe_parallel.training.checkpoint.background import Background
    from moe_parallel.training.engine import Engine
    from moe_parallel.training.saves import Saves

    record = SaveTimes()
    save, sync, step = Saves.save, Telemetry.sync, Engine.step
    wait_for_copy = Background.wait_for_copy
    writers: list[Saves] = []
    timing: list[Save] = []  # the save whose call is timed now

    def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        begin = time.perf_counter()
        return function(*arguments), time.perf_counter() - begin

    def timed_save(self: Saves, state: Any, *, can_wait: bool) -> None:
        self.finish(state.iteration)
        writers[:] = [self]
        if not can_wait:  # the last one
            return save(self, state, can_wait=False)
        is_async = len(record.saves) % 2 == 1
        record.saves.append(Save(is_async))
        timing[:] = record.saves[-1:]
        _, record.saves[-1].call = timed(partial(save, can_wait=is_async), self, state)
        timing.clear()
        return None

    def timed_sync(self: Telemetry) -> None:
        _, seconds = timed(sync, self)
        for each in timing:
            each.flush += seconds

    def timed_wait(self: Background) -> None:
        is_first = self.pending is not None and record.saves[-1].wait == 0
        _, seconds = timed(wait_for_copy, self)
        if is_first:
            record.saves[-1].wait = seconds

    def timed_step(self: Engine, batches: Any) -> Any:
        writing = bool(writers) and writers[0].is_writing()
        result, seconds = timed(step, self, batches)
        record.steps.append((seconds, writing))
        return result

    with (
        mock.patch.object(Saves, "save", timed_save),
        mock.patch.object(Telemetry, "sync", timed_sync),
        mock.patch.object(Background, "wait_for_copy", timed_wait),
        mock.patch.object(Engine, "step", timed_step),
    ):
        yield record


def table(record: SaveTimes) -> str:
    """The medians of both kinds, their ratio beside the goal, and what a write costs the steps."""
    waited = [each for each in record.saves if not each.is_async]
    beside = [each for each in record.saves if each.is_async]
    lines = [f"{'':14}{'stall':>10}{'with the flush of the logs':>30}{'wait for the copy':>20}"]
    for name, kind in (("synchronous", waited), ("asynchronous", beside)):
        stall, flushed, wait = (
            statistics.median(values)
            for values in (
                [each.stall for each in kind],
                [each.stall + each.flush for each in kind],
                [each.wait for each in kind],
            )
        )
        lines.append(f"{name:14}{_ms(stall):>10}{_ms(flushed):>30}{_ms(wait):>20}")
    ratio, flushed = ratios(record)
    verdict = "met" if ratio <= GOAL else "missed"
    lines.append(f"{'ratio':14}{ratio:>10.1%}{flushed:>30.1%}   {verdict} (goal <= {GOAL:.0%})")
    during = [seconds for seconds, writing in record.steps if writing]
    alone = [seconds for seconds, writing in record.steps if not writing]
    if during and alone:
        slower = statistics.median(during) / statistics.median(alone)
        lines.append(f"a step during a write takes {slower:.2f} times as long as another")
    return "\n".join(lines)


def ratios(record: SaveTimes) -> tuple[float, float]:
    """Asynchronous over synchronous medians: of the stall, and of the stall with the flush."""
    halves = [[each for each in record.saves if each.is_async is kind] for kind in (True, False)]
    stall = [statistics.median(each.stall for each in half) for half in halves]
    flushed = [statistics.median(each.stall + each.flush for each in half) for half in halves]
    return stall[0] / stall[1], flushed[0] / flushed[1]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
