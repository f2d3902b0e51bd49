"""Starts runs of a study, each in its own process, and waits until they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from moe_parallel.analysis.study.folder import Cell
from moe_parallel.config import Config
from moe_parallel.platform import machine
from moe_parallel.training.checkpoint.folder import CheckpointFolder
from moe_parallel.training.signals import handle_stop_signals

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pretrain_gpt_moe.py"
_ONE_CTRL_C_SECONDS = 1.0  # a wrapper may send one Ctrl-C a second time
_OF_ANOTHER_JOB = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NPROCS",
)  # fmt: skip


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
            now = time.monotonic()
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
        command = self._command(cell)
        facts = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self._machine,
            "software": self._software,
            "load_average": os.getloadavg()[0],
            "jobs": self.jobs,
        }
        begin, busy = time.monotonic(), machine.busy_seconds()
        with cell.output.open("ab") as output:
            process = subprocess.Popen(
                command, env=self._environment(), stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C reaches only us; we pass it on once
            )  # fmt: skip
        with stop.watching(process):
            # Gives the CPU time of the process and of its children (the launcher's ranks).
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - begin
        others = machine.busy_seconds() - busy - usage.ru_utime - usage.ru_stime
        measured = {
            "seconds": round(seconds, 1),
            "exit_code": process.returncode,
            "other_cores": round(max(0.0, others) / seconds, 3),
        }
        cell.add_attempt(facts | measured)
        return process.returncode

    def _command(self, cell: Cell) -> list[str]:
        command = [sys.executable, str(SCRIPT), "--config", str(cell.folder / "cell.yaml")]
        if self._processes > 1:
            command += ["--nproc-per-node", str(self._processes)]
        if CheckpointFolder(cell.folder).newest_first():
            command += ["--load", str(cell.folder)]
        return command

    def _environment(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_JOB}
        path = os.pathsep.join(filter(None, [str(ROOT), ours.get("PYTHONPATH", "")]))
        return ours | {"OMP_NUM_THREADS": str(self._threads), "PYTHONPATH": path}
