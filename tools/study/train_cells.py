"""Trains the runs of a study, several side by side, and prints how each ends."""

from __future__ import annotations

import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import datetime, timedelta
from time import monotonic

from cell_runner import CellRunner, CellStop
from schedule import Schedule

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.study.folder import DIVERGED, Cell, StudyManifest
from moe_parallel.analysis.study.measures import measures
from moe_parallel.reading import read_end
from moe_parallel.tool import last_line


class TimeLimit:
    """The time in which runs may start: `minutes` from now; None: any time.

    was_reached: whether a run was not started because the time was over.
    """

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else monotonic() + 60 * minutes
        self.was_reached = False

    def allows_a_start(self) -> bool:
        if self._end is not None and monotonic() >= self._end:
            self.was_reached = True
        return not self.was_reached


def train(
    manifest: StudyManifest,
    schedule: Schedule,
    runner: CellRunner,
    stop: CellStop,
    limit: TimeLimit,
) -> dict[Cell, int]:
    """Run the cells of the schedule that are not finished, until a stop is requested or the time is
    over.

    Returns the exit codes of those that failed.
    """
    jobs, known, left = runner.jobs, schedule.known(), schedule.left()
    if len(left) < len(known):
        whole = len(known) + schedule.number_unknown()
        print(f"{len(known) - len(left)} of {whole} runs are finished already")
    lines = _Lines(len(known) - len(left), len(left) + schedule.number_unknown(), jobs)
    failed: dict[Cell, int] = {}
    begun: set[Cell] = set()
    running: dict[Future[int], Cell] = {}
    with ThreadPoolExecutor(jobs) as threads:
        while True:
            for cell in schedule.left():
                if len(running) == jobs or stop.asked:
                    break
                if cell not in begun:
                    if not limit.allows_a_start():
                        break
                    begun.add(cell)
                    lines.begin(cell)
                    config = manifest.config_of(cell)
                    running[threads.submit(runner.run, cell, config, stop)] = cell
            if not running:
                return failed
            for each in wait(running, return_when=FIRST_COMPLETED).done:
                cell, code = running.pop(each), each.result()
                finished = manifest.is_finished(cell) and code == 0
                if finished or (cell.lr is not None and code == DIVERGED):
                    lines.end(cell, _outcome(cell) if finished else "diverged")
                elif not stop.asked:
                    failed[cell] = code
                    lines.fail(cell, _failure(cell, code))


class _Lines:
    """What is printed of each run: its number among all and how it ended, and what is left then.

    finished: the number of runs that were finished before; number: that of the others.
    """

    def __init__(self, finished: int, number: int, jobs: int) -> None:
        self._finished, self._number, self._jobs = finished, number, jobs
        self._labels: dict[Cell, str] = {}
        self._running: dict[Cell, float] = {}  # since when
        self._seconds: list[float] = []  # of the runs that have ended
        self._failed = 0

    def begin(self, cell: Cell) -> None:
        place = len(self._labels) + 1
        label = f"[{place:>{len(str(self._number))}}/{self._number}] {cell.label}"
        self._labels[cell], self._running[cell] = label, monotonic()
        print(f"{label}: training; to follow it: tail -f {cell.output}", flush=True)

    def end(self, cell: Cell, outcome: str) -> None:
        seconds = self._ended(cell)
        print(f"{self._labels[cell]}: {outcome}; {_duration(seconds)}", flush=True)
        self._tell_progress()

    def fail(self, cell: Cell, reason: str) -> None:
        self._ended(cell)
        self._failed += 1
        print(f"{self._labels[cell]}: {reason}", file=sys.stderr, flush=True)
        self._tell_progress()

    def _ended(self, cell: Cell) -> float:
        self._seconds.append(monotonic() - self._running.pop(cell))
        return self._seconds[-1]

    def _tell_progress(self) -> None:
        """The counts of runs, and when the last will end if all take as long as those before."""
        left = self._number - len(self._labels)
        if not left and not self._running:
            return
        mean, now = sum(self._seconds) / len(self._seconds), monotonic()
        rests = [max(0.0, mean - (now - since)) for since in self._running.values()]
        ahead = max([(left * mean + sum(rests)) / self._jobs, *rests])
        done = self._finished + len(self._seconds) - self._failed
        failed = f", {self._failed} failed" if self._failed else ""
        end = datetime.now() + timedelta(seconds=ahead)
        print(
            f"{done} of {self._finished + self._number} runs done{failed}, {len(self._running)} "
            f"running, {left} left: {_duration(ahead)}, until {end:%Y-%m-%d %H:%M}",
            flush=True,
        )


def _outcome(cell: Cell) -> str:
    numbers = measures(RunHistory.from_records(cell.records()))
    losses = [
        f"{name.rpartition('/')[0]} {value:.4f}"
        for name, value in numbers.items()
        if name.endswith("/loss")
    ]
    return f"loss {', '.join(losses)}; {numbers['tokens_per_second']:,.0f} tokens/s"


def _failure(cell: Cell, code: int) -> str:
    if code == 0:
        return "ended without an evaluation: give --config a --split with held-out text"
    return f"failed with exit code {code}: {last_line(read_end(cell.output))}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.0f} s"
