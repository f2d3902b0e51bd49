"""Starts a run of a study in its own process and waits until it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from moe_parallel.analysis.study.folder import Cell
from moe_parallel.config import Config
from moe_parallel.platform import machine
from moe_parallel.training.checkpoint.folder import CheckpointFolder

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pretrain_gpt_moe.py"
_ONE_CTRL_C_SECONDS = 1.0  # a wrapper may send one Ctrl-C a second time
_OF_ANOTHER_JOB = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NPROCS",
)  # fmt: skip


class StopRequest:
    """Records Ctrl-C, SIGTERM and SIGUSR1. The current run then receives a signal to stop.

    Only a second Ctrl-C kills it: a batch system may send a signal several times.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._ctrl_c: float | None = None  # the time of the first
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Inside, the signals are passed to the run and do not end this process."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def watching(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        self._process = process
        try:
            if self.asked:  # between two runs
                process.terminate()
            yield
        finally:
            self._process = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        if self._process is None:
            return
        if self.asked == 1:
            print("\nstopping: the run saves after its step (Ctrl-C again: at once)", flush=True)
            self._process.terminate()
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._ctrl_c is not None and now - self._ctrl_c > _ONE_CTRL_C_SECONDS:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._ctrl_c = self._ctrl_c or now


class CellRunner:
    """Starts runs, one at a time, and records how each ends."""

    def __init__(self, processes: int, threads: int) -> None:
        self._processes, self._threads = processes, threads
        self._machine, self._software = machine.machine(), machine.software(ROOT)

    def run(self, cell: Cell, config: Config, stop: StopRequest) -> int:
        """Train `cell`, from its checkpoint if it has one; returns the exit code of the program.

        Appends the output to `cell.output`, and a line to the attempts of the cell.
        """
        cell.folder.mkdir(parents=True, exist_ok=True)
        (cell.folder / "cell.yaml").write_text(config.to_yaml(), encoding="utf-8")
        command = self._command(cell)
        facts = {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": self._machine,
            "software": self._software,
            "load_average": os.getloadavg()[0],
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
        if CheckpointFolder(cell.folder).latest() is not None:
            command += ["--load", str(cell.folder)]
        return command

    def _environment(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_JOB}
        path = os.pathsep.join(filter(None, [str(ROOT), ours.get("PYTHONPATH", "")]))
        return ours | {"OMP_NUM_THREADS": str(self._threads), "PYTHONPATH": path}
