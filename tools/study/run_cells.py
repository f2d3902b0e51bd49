"""The runs of a study: their order, their processes, several side by side, and how each ends."""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from types import FrameType

from moe_parallel.analysis.study.folder import (
    DIVERGED,
    STUDY_MANIFEST,
    Cell,
    StudyFolder,
    StudyManifest,
    Sweep,
    pilot_cells,
    read_sweep,
    tuned_options,
)
from moe_parallel.config import Config
from moe_parallel.data.atomic_files import write_atomically
from moe_parallel.platform import machine
from moe_parallel.reading import read_end
from moe_parallel.tool import last_line
from moe_parallel.training.checkpoint.folder import CheckpointFolder
from moe_parallel.training.signals import handle_stop_signals

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pretrain_gpt_moe.py"
STAGES = ("grid", "further", "balance", "seeds")  # three of pilot runs, then the compared runs
_ONE_CTRL_C_SECONDS = 1.0  # a wrapper may send one Ctrl-C a second time
_OF_ANOTHER_JOB = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NPROCS",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Every `number`-th run of a stage, from the `first` one on."""

    first: int
    number: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """`0/4`, the first of four parts."""
        if not (match := re.fullmatch(r"([0-9]+)/([1-9][0-9]*)", text)):
            raise argparse.ArgumentTypeError(f"{text} is not I/N, such as 0/4")
        first, number = int(match[1]), int(match[2])
        if first >= number:
            raise argparse.ArgumentTypeError(
                f"{text}: the parts are 0/{number} to {number - 1}/{number}"
            )
        return cls(first, number)


class Schedule:
    """The runs that a command asks for, as they become known.

    A contender's further run is known when its grid is finished, those of balance-grid after it,
    and its compared runs when its pilot runs have decided their options. `seeds`: those of the
    compared runs, by contender. `stages`: those of STAGES to train. `part`: None, or the share of
    each stage.
    """

    def __init__(
        self,
        folder: StudyFolder,
        manifest: StudyManifest,
        seeds: Mapping[str, Sequence[int]],
        stages: Sequence[str] = STAGES,
        part: Part | None = None,
    ) -> None:
        self._folder, self._manifest = folder, manifest
        self._seeds, self._stages, self._part = seeds, stages, part
        self._factors = len(manifest.design.lr_grid)
        self._sweeps: dict[str, Sweep] = {}  # the finished ones
        self._over: set[Cell] = set()

    def known(self) -> list[Cell]:
        """The runs that are known now, in order, finished or not."""
        start, step = (0, 1) if self._part is None else (self._part.first, self._part.number)
        return [cell for stage in self._stages for cell in self._cells(stage)[start::step]]

    def left(self) -> list[Cell]:
        """The known runs that are still to be trained."""
        known = self.known()
        self._over |= {c for c in known if c not in self._over and self._manifest.is_over(c)}
        return [cell for cell in known if cell not in self._over]

    def unknown(self) -> Counter[str]:
        """The number of runs of each contender that are not known yet."""
        balance = self._manifest.design.balance_grid
        number = Counter[str]()
        for stage in self._stages:
            for name, its in self._seeds.items():
                number[name] += {
                    "grid": self._factors,
                    "further": min(1, self._factors),
                    "balance": len(balance[name][1]) if name in balance else 0,
                    "seeds": len(its),
                }[stage]
            number.subtract(cell.contender for cell in self._cells(stage))
        return +number

    def _cells(self, stage: str) -> list[Cell]:
        if stage == "seeds":
            decided = {n: its for n, its in self._seeds.items() if self._is_decided(n)}
            return list(self._folder.cells(decided))
        if not self._factors:
            return []
        first = {"grid": 0, "further": self._factors, "balance": self._factors + 1}
        of_each = [self._pilots(name) for name in self._seeds]
        most = max(map(len, of_each), default=0)
        end = {"grid": self._factors, "further": self._factors + 1, "balance": most}[stage]
        places = range(first[stage], end)
        return [cells[place] for place in places for cells in of_each if place < len(cells)]

    def _pilots(self, name: str) -> list[Cell]:
        sweep = self._sweeps.get(name) or read_sweep(self._folder, self._manifest, name)
        if sweep.is_finished:
            self._sweeps[name] = sweep
        return pilot_cells(self._folder, self._manifest, name, sweep)

    def _is_decided(self, name: str) -> bool:
        """Whether the options of the compared runs are known. They are recorded, and never change
        again."""
        tuned = self._manifest.tuned
        if self._factors and name not in tuned:
            options = tuned_options(self._folder, self._manifest, name)
            if options is None:
                return False
            tuned[name] = options
            write_atomically(self._folder.path / STUDY_MANIFEST, self._manifest.to_json())
        return True


class CellStop:
    """Records Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP. The current runs then receive a signal to stop.

    Only a second Ctrl-C kills them: a batch system may send a signal several times. Runs are
    watched from several threads, and signals arrive in the first.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._ctrl_c: float | None = None  # the time of the first
        self._processes: set[subprocess.Popen[bytes]] = set()

    @contextmanager
    def listening(self) -> Iterator[CellStop]:
        """Inside, the signals are passed to the run and do not end this process."""
        before = handle_stop_signals(self._note)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def watching(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        self._processes.add(process)
        try:
            if self.asked:  # before the process was watched
                _terminate(process)
            yield
        finally:
            self._processes.discard(process)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        current = self._processes.copy()
        if not current:
            return
        if self.asked == 1:
            for process in current:
                _terminate(process)
            which = "the run saves after its step" if len(current) == 1 else "the runs save"
            with suppress(OSError):  # of a terminal that was closed
                print(f"\nstopping: {which} (Ctrl-C again: at once)", flush=True)
        if number == signal.SIGINT:
            now = monotonic()
            if self._ctrl_c is not None and now - self._ctrl_c > _ONE_CTRL_C_SECONDS:
                for process in current:
                    with suppress(ProcessLookupError):  # it has just ended
                        os.killpg(process.pid, signal.SIGKILL)
            self._ctrl_c = self._ctrl_c or now


def _terminate(process: subprocess.Popen[bytes]) -> None:
    # Not Popen.terminate, which may reap the process that another thread waits for.
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)


class CellRunner:
    """Starts runs and records how each ends. `jobs`: the number of runs side by side."""

    def __init__(self, processes: int, threads: int, jobs: int = 1) -> None:
        self._processes, self._threads, self.jobs = processes, threads, jobs
        self._machine, self._software = machine.machine(), machine.software(ROOT)

    def run(self, cell: Cell, config: Config, stop: CellStop) -> int:
        """Train `cell`, from its checkpoint if it has one; returns the exit code of the program.

        Appends the output to `cell.output`, and a line to the attempts of the cell.
        """
        cell.folder.mkdir(parents=True, exist_ok=True)
        (cell.folder / "cell.yaml").write_text(config.to_yaml(), encoding="utf-8")
        command = [sys.executable, str(SCRIPT), "--config", str(cell.folder / "cell.yaml")]
        if self._processes > 1:
            command += ["--nproc-per-node", str(self._processes)]
        if CheckpointFolder(cell.folder).newest_first():
            command += ["--load", str(cell.folder)]
        ours = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_JOB}
        path = os.pathsep.join(filter(None, [str(ROOT), ours.get("PYTHONPATH", "")]))
        started, begin = datetime.now(UTC).isoformat(timespec="seconds"), monotonic()
        with cell.output.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=ours | {"OMP_NUM_THREADS": str(self._threads), "PYTHONPATH": path},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C reaches only us; passed on once
            )
        with stop.watching(process):
            code = process.wait()
        cell.add_attempt(
            {
                "started": started,
                "machine": self._machine,
                "software": self._software,
                "jobs": self.jobs,
                "seconds": round(monotonic() - begin, 1),
                "exit_code": code,
            }
        )
        return code


def train(
    manifest: StudyManifest,
    schedule: Schedule,
    runner: CellRunner,
    stop: CellStop,
    minutes: float | None,
) -> dict[Cell, int]:
    """Run the cells of the schedule that are not finished, until a stop is requested or the minutes
    are over; None: there is time.

    Returns the exit codes of those that failed.
    """
    end = None if minutes is None else monotonic() + 60 * minutes
    jobs, left, known = runner.jobs, schedule.left(), schedule.known()
    done, whole = len(known) - len(left), len(known) + schedule.unknown().total()
    if done:
        print(f"{done} of {whole} runs are finished already")
    lines = _Lines(whole - done, jobs)
    failed: dict[Cell, int] = {}
    begun: set[Cell] = set()
    running: dict[Future[int], Cell] = {}
    with ThreadPoolExecutor(jobs) as threads:
        while True:
            for cell in schedule.left():
                over = end is not None and monotonic() >= end
                if len(running) == jobs or stop.asked or over:
                    break
                if cell not in begun:
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
                    lines.end(cell, _failure(cell, code), failed=True)


class _Lines:
    """What is printed of each run: its number of all, how it ended, and how long the rest takes."""

    def __init__(self, number: int, jobs: int) -> None:
        self._number, self._jobs = number, jobs
        self._begun: dict[Cell, tuple[str, float]] = {}  # labels, and when
        self._seconds: list[float] = []  # of the runs that have ended

    def begin(self, cell: Cell) -> None:
        place = len(self._begun) + 1
        label = f"[{place:>{len(str(self._number))}}/{self._number}] {cell.label}"
        self._begun[cell] = label, monotonic()
        print(f"{label}: training; to follow it: tail -f {cell.output}", flush=True)

    def end(self, cell: Cell, outcome: str, *, failed: bool = False) -> None:
        """Tell how the run ended, and how long the others take if they take as long as those."""
        label, since = self._begun[cell]
        self._seconds.append(monotonic() - since)
        took = "" if failed else f"; {_duration(self._seconds[-1])}"
        left = self._number - len(self._seconds)
        ahead = _duration(statistics.fmean(self._seconds) * left / self._jobs)
        rest = f"; {left} left, about {ahead}" if left else ""
        file = sys.stderr if failed else sys.stdout
        print(f"{label}: {outcome}{took}{rest}", file=file, flush=True)


def _outcome(cell: Cell) -> str:
    numbers = cell.measures()
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
