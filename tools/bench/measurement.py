"""Measures a bench. Contenders and ceiling take turns, so that disturbances affect all equally."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tools.bench.ceilings import ceiling_of
from tools.bench.clock import WorkClock, WorkTimer
from tools.bench.contender import (
    BACKWARD,
    FORWARD,
    STEP,
    Absent,
    Bench,
    BenchContender,
    Measure,
    Values,
    one_line,
)
from tools.bench.memory import peak_bytes, saved_bytes
from tools.bench.results import BenchResult, BenchRow

FEWEST_TURNS, MOST_TURNS = 5, 25
# Relative to the largest value of a tensor. Contenders round at different places and sum in a
# different order. A wrong row or a missing prob causes an error about as large as the values.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Patience:
    """The time limit of a row: as many turns as fit in `seconds`, unless their number is given."""

    seconds: float
    turns: int | None = None

    def turns_of(self, one_turn: float) -> int:
        if self.turns is not None:
            return self.turns
        return min(MOST_TURNS, max(FEWEST_TURNS, int(self.seconds / max(one_turn, 1e-9))))


def measure(bench: Bench, clock: WorkClock, device: str, patience: Patience) -> list[BenchRow]:
    """A row for each measure of the bench."""
    results = _judge(bench, device)
    return_memory(device)
    able = {result.name for result in results if result.absent is None}
    contenders = [contender for contender in [*bench.ours, *bench.peers] if contender.name in able]
    rows = []
    for one in bench.measures:
        rows.append(_row(bench, one, contenders, results, clock, device, patience))
        return_memory(device)
    return rows


def return_memory(device: str) -> None:
    """Give the memory that nothing uses back to the GPU: what a graph has had, no other may use."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _judge(bench: Bench, device: str) -> list[BenchResult]:
    """Run each contender once, compare its results, and measure its memory.

    A peer that fails is absent, with its error. A failure of our own operator is raised.
    """
    expected: dict[str, Values] = {}

    def judged(contender: BenchContender) -> BenchResult:
        values = contender.values()
        first = expected.setdefault(contender.answer, values)
        differs = None if values is first else disagreement(values, first, bench.dtype)
        del values, first
        return BenchResult(
            contender.name,
            differs=differs,
            saved_bytes=saved_bytes(contender),
            peak_bytes=peak_bytes(contender, device),
        )

    def judged_peer(peer: BenchContender | Absent) -> BenchResult:
        if isinstance(peer, Absent):
            return BenchResult(peer.name, absent=peer.reason)
        try:
            return judged(peer)
        except Exception as error:  # another package may raise anything
            return BenchResult(peer.name, absent=f"failed: {one_line(error)}")

    return [*map(judged, bench.ours), *map(judged_peer, bench.peers)]


def disagreement(values: Values, expected: Values, dtype: torch.dtype) -> str | None:
    """The value that differs most, beyond rounding, or None. Other names or shapes also differ."""
    if values.keys() != expected.keys():
        return f"has {', '.join(values)} instead of {', '.join(expected)}"
    worst, worst_name = 0.0, ""
    for name, value in values.items():
        if value.shape != expected[name].shape:
            return f"{name} is {tuple(value.shape)}, not {tuple(expected[name].shape)}"
        distance = _distance(value, expected[name])
        if not distance <= worst:  # so that NaN counts
            worst, worst_name = distance, name
    if worst <= TOLERANCE[dtype]:
        return None
    return f"{worst_name} is off by {worst:.1e} of its largest value"


def _distance(value: Tensor, expected: Tensor) -> float:
    """The largest difference in units of the largest value; integers differ or do not."""
    if value.numel() == 0:
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(value, expected) else float("inf")
    difference = (value.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max().clamp(min=1e-30))


def _row(
    bench: Bench,
    one: Measure,
    contenders: list[BenchContender],
    results: list[BenchResult],
    clock: WorkClock,
    device: str,
    patience: Patience,
) -> BenchRow:
    ceiling = ceiling_of(one.work, bench.dtype, device)
    timers = {
        one.work.ceiling: clock.timer(ceiling),
        **{c.name: _timer(c, one.timed, clock) for c in contenders},
    }
    samples = take_turns(timers, patience)

    def with_samples(result: BenchResult) -> BenchResult:
        reason = timers[result.name].without_graph if result.name in timers else None
        return replace(result, samples=samples.get(result.name, []), without_graph=reason)

    return BenchRow(
        op=bench.op,
        timed=one.timed,
        size=str(bench.size),
        dtype=str(bench.dtype).removeprefix("torch."),
        unit=one.work.unit,
        amount=one.work.amount,
        ceiling=with_samples(BenchResult(one.work.ceiling)),
        results=[with_samples(result) for result in results],
    )


def take_turns(
    hands: Mapping[str, Callable[[], float]], patience: Patience
) -> dict[str, list[float]]:
    """The seconds of each contender in each turn: A B C, A B C, ... An extra first turn warms
    up."""
    gc.collect()
    gc.disable()  # a collection would count for one contender at random
    try:
        start = time.monotonic()
        for work in hands.values():
            work()
        turns = patience.turns_of(time.monotonic() - start)
        samples: dict[str, list[float]] = {name: [] for name in hands}
        for _ in range(turns):
            for name, work in hands.items():
                samples[name].append(work())
    finally:
        gc.enable()
    return samples


def _timer(contender: BenchContender, timed: str, clock: WorkClock) -> WorkTimer:
    if timed == FORWARD:
        return clock.timer(contender.forward)
    if timed == BACKWARD:
        return clock.timer(contender.backward, lambda: (contender.forward(),))
    if timed == STEP:
        return clock.timer(contender.step, contender.before_step)
    return clock.timer(contender.run)
