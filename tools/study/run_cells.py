"""The runs of a study: their order, their processes, several side by side, and how each ends."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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
STAGES = ("grid", "further", "seeds")  # grids of pilot runs, further pilot runs, compared runs
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

    A contender's further run is known when its grid is finished, and its compared runs when its
    pilot runs have decided their options. `seeds`: those of the compared runs, by contender.
    `stages`: those of STAGES to train. `part`: None, or the share of each stage.
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
        self._names, self._seeds, self._stages, self._part = list(seeds), seeds, stages, part
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

    def number_unknown(self) -> int:
        """The number of runs that are not known yet."""
        if self._part is not None:
            return 0
        whole = {
            "grid": len(self._names) * self._factors,
            "further": len(self._names) if self._factors else 0,
            "seeds": sum(map(len, self._seeds.values())),
        }
        return sum(whole[stage] - len(self._cells(stage)) for stage in self._stages)

    def undecided(self) -> list[str]:
        """The contenders of which a stage does not know its runs, though nothing is left."""
        if not self._factors:
            return []
        known = {
            stage: [cell.contender for cell in self._cells(stage)]
            for stage in self._stages
            if stage != "grid"
        }
        return [
            name
            for name in self._names
            if any(
                names.count(name) < (1 if stage == "further" else len(self._seeds[name]))
                for stage, names in known.items()
            )
        ]

    def _cells(self, stage: str) -> list[Cell]:
        if stage == "seeds":
            decided = {
                name: its
                for name, its in self._seeds.items()
                if not self._factors or self._is_decided(name)
            }
            return list(self._folder.cells(decided))
        if not self._factors:
            return []
        of_each = [self._pilots(name) for name in self._names]
        places = range(self._factors) if stage == "grid" else [self._factors]
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
        if name not in tuned:
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
        facts = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self._machine,
            "software": self._software,
            "load_average": os.getloadavg()[0],
            "jobs": self.jobs,
        }
        begin, busy = monotonic(), machine.busy_seconds()
        with cell.output.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=ours | {"OMP_NUM_THREADS": str(self._threads), "PYTHONPATH": path},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C reaches only us; passed on once
            )
        with stop.watching(process):
            # Gives the CPU time of the process and of its children (the launcher's ranks).
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = monotonic() - begin
        others = machine.busy_seconds() - busy - usage.ru_utime - usage.ru_stime
        measured = {
            "seconds": round(seconds, 1),
            "exit_code": process.returncode,
            "other_cores": round(max(0.0, others) / seconds, 3),
        }
        cell.add_attempt(facts | measured)
        return process.returncode


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
    jobs, known, left = runner.jobs, schedule.known(), schedule.left()
    unknown = schedule.number_unknown()
    if len(left) < len(known):
        print(f"{len(known) - len(left)} of {len(known) + unknown} runs are finished already")
    lines = _Lines(len(known) - len(left), len(left) + unknown, jobs)
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

    def end(self, cell: Cell, outcome: str, *, failed: bool = False) -> None:
        """Tell how the run ended, and when the last will if all take as long as those before."""
        now = monotonic()
        seconds = now - self._running.pop(cell)
        self._seconds.append(seconds)
        self._failed += failed
        took = "" if failed else f"; {_duration(seconds)}"
        file = sys.stderr if failed else sys.stdout
        print(f"{self._labels[cell]}: {outcome}{took}", file=file, flush=True)
        left = self._number - len(self._labels)
        if not left and not self._running:
            return
        mean = sum(self._seconds) / len(self._seconds)
        rests = [max(0.0, mean - (now - since)) for since in self._running.values()]
        ahead = max([(left * mean + sum(rests)) / self._jobs, *rests])
        done = self._finished + len(self._seconds) - self._failed
        bad = f", {self._failed} failed" if self._failed else ""
        print(
            f"{done} of {self._finished + self._number} runs done{bad}, {len(self._running)} "
            f"running, {left} left: {_duration(ahead)}, until "
            f"{datetime.now() + timedelta(seconds=ahead):%Y-%m-%d %H:%M}",
            flush=True,
        )


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
