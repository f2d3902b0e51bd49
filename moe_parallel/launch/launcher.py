"""The launcher of one node: starts the ranks, passes signals on, and carries their exit code.

torchrun ends its ranks 30 seconds after a signal, exits with 1 for every failure, and restarts a
job whatever ended it. Here the ranks save, and their exit code says how the job ended.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

import torch
from torch import distributed as dist

from moe_parallel.config.parser import LaunchOptions
from moe_parallel.errors import InputError
from moe_parallel.training.failure import (
    STARTED,
    FailureChannel,
    of_this_start,
    tell,
)
from moe_parallel.training.signals import (
    BEFORE_TRAINING,
    EXIT_CTRL_C,
    EXIT_INTERRUPTED,
    EXIT_KILLED,
    FINAL,
    handle_stop_signals,
)

_PATIENCE_SECONDS = 10.0  # for the other ranks to exit after one has; see `training.failure`
_ONE_CTRL_C_SECONDS = 1.0  # a wrapper may send one Ctrl-C a second time


class Launcher:
    """Starts the ranks, watches them, and starts them again after a failure."""

    def __init__(self, options: LaunchOptions, script: str) -> None:
        """The ranks run `script`. From here on signals go to them. Raises InputError."""
        cores = len(os.sched_getaffinity(0))
        gpus = torch.cuda.device_count()
        named = {"cpu": cores, "gpu": gpus, "auto": gpus or cores}
        self._command = [sys.executable, script, *options.program]
        self._number = int(named.get(options.processes, options.processes))
        if not self._number:
            raise InputError("--nproc-per-node is gpu, and torch finds no GPU here: name a number")
        self._options = options
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._asked: list[tuple[signal.Signals, float]] = []  # signals and their times
        self._passed_on = 0  # number of these that were sent to the ranks
        self._killed: int | None = None  # the exit code, if the launcher has killed the ranks
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // self._number)))
        os.environ.setdefault(STARTED, str(time.time()))  # a job script may have begun earlier
        handle_stop_signals(self._note)

    def run(self) -> int:
        """Returns the exit code of the job."""
        most = self._options.max_restarts
        for restart in range(most + 1):
            if restart:
                tell(f"starting again: restart {restart} of {most}")
            code = self._run_once(restart)
            if code in (0, *FINAL) or self._asked:
                break
        return code

    def _run_once(self, restart: int) -> int:
        """Start the ranks and wait for their end; returns the exit code."""
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._start_ranks(store.port, restart)
        codes = self._codes()
        while None in codes and not any(codes):
            self._pass_signals_on()
            time.sleep(0.05)
            codes = self._codes()
        if not any(codes):
            return 0
        lost = self._report_lost(FailureChannel(of_this_start(store, str(restart))))
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while None in self._codes() and time.monotonic() < deadline:
            self._pass_signals_on()
            time.sleep(0.05)
        told = max((code for code in self._codes() if code is not None), default=0)
        self._send(signal.SIGKILL)
        for rank in self._ranks:
            rank.wait()
        if self._killed is not None:
            return self._killed
        return lost or (told if told > 0 else self._stopped_early())

    def _start_ranks(self, port: int, restart: int) -> None:
        """Start the ranks with torchrun's variables, each in a session of its own."""
        self._ranks = []
        for rank in range(self._number):
            variables = {
                "RANK": rank, "LOCAL_RANK": rank,
                "WORLD_SIZE": self._number, "LOCAL_WORLD_SIZE": self._number,
                "MASTER_ADDR": "localhost", "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": True,  # the launcher serves the store
                "TORCHELASTIC_RESTART_COUNT": restart,
            }  # fmt: skip
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            # Ctrl-C of the terminal then reaches the launcher alone.
            started = subprocess.Popen(self._command, env=environment, start_new_session=True)
            self._ranks.append(started)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked.append((signal.Signals(number), time.monotonic()))

    def _pass_signals_on(self) -> None:
        for number, when in self._asked[self._passed_on :]:
            self._passed_on += 1
            self._send(number)
            interrupts = [at for each, at in self._asked if each == signal.SIGINT]
            if number == signal.SIGINT and when - interrupts[0] > _ONE_CTRL_C_SECONDS:
                self._kill(
                    EXIT_CTRL_C, "interrupted twice: the ranks were killed, and have not saved"
                )
            elif number == signal.SIGINT and len(interrupts) == 1 and sys.stderr.isatty():
                tell("stopping: the run saves after its step (Ctrl-C again: at once, unsaved)")
        timeout = self._options.shutdown_timeout
        if self._asked and time.monotonic() > self._asked[0][1] + timeout:
            self._kill(
                EXIT_KILLED,
                f"error: the ranks did not leave within {timeout} s of "
                f"{self._asked[0][0].name} (--shutdown-timeout) and were killed",
            )

    def _report_lost(self, channel: FailureChannel) -> int | None:
        """The exit code if a rank was killed, by a signal that is not ours; claims this error."""
        ours = {number for number, _ in self._asked}
        for rank, process in enumerate(self._ranks):
            code = process.poll()
            if self._killed is None and code is not None and code < 0 and -code not in ours:
                number = signal.Signals(-code)
                channel.claim(128 + number)
                why = ", as the kernel does when memory is full" if number == signal.SIGKILL else ""
                tell(
                    f"error: rank {rank} (process {process.pid} on {socket.gethostname()}) was "
                    f"killed by {number.name}{why}; the other ranks cannot continue without it"
                )
                return 128 + number
        return None

    def _stopped_early(self) -> int:
        """The exit code if the signal came before the ranks handled signals."""
        number = self._asked[0][0]
        tell(f"stopped by {number.name} {BEFORE_TRAINING}")
        return EXIT_CTRL_C if number == signal.SIGINT else EXIT_INTERRUPTED

    def _kill(self, code: int, message: str) -> None:
        if self._killed is None:
            tell(message)
            self._killed = code
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        """Send the signal to each rank; SIGKILL also to the processes that the rank started."""
        for process in self._ranks:
            with suppress(ProcessLookupError, PermissionError):
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)

    def _codes(self) -> list[int | None]:
        """By rank: the exit code, the negative signal number, or None while it runs."""
        return [process.poll() for process in self._ranks]
