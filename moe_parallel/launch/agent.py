"""torch's agent of one node, with our own handling of signals, restarts and error messages.

torch's agent ends its ranks with SIGTERM and SIGKILL, raises at an arbitrary point when a signal
comes, and restarts a job whatever ended it. This agent passes signals on and continues to watch:
the ranks save, and their exit codes report how the job ended.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from moe_parallel.training.failure import ATTEMPT, LAUNCHER, FailureChannel, tell, visit_store
from moe_parallel.training.signals import (
    EXIT_CTRL_C,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_KILLED,
    FINAL,
    StopRequest,
    handle_stop_signals,
)

_PATIENCE_SECONDS = 10.0  # for the other ranks to exit after one has; see `failure`
_WATCH_SECONDS = 0.5  # between two looks at the job's exit code
_SERVE_SECONDS = 5.0  # for the launchers of other nodes to see it while the store is served
_ONE_CTRL_C_SECONDS = 1.0  # a wrapper may send one Ctrl-C a second time


class JobAgent(LocalElasticAgent):
    """Starts the ranks of a node, watches them and ends with `exit_code`."""

    def __init__(
        self, spec: WorkerSpec, logs_specs: LogsSpecs, shutdown_timeout: int, stop: StopRequest
    ) -> None:
        """`shutdown_timeout`: seconds for the ranks to exit after a signal. `stop` receives signals
        while there are no ranks."""
        super().__init__(spec, logs_specs)
        self._shutdown_timeout = shutdown_timeout  # an argument since torch 2.13
        self.exit_code = EXIT_FAILED
        self._stop = stop
        self._asked: list[tuple[signal.Signals, float]] = []  # signals and their times
        self._passed_on = 0  # number of these that were sent to the ranks
        self._killed = False
        self._over = False  # whether `_end` has decided how this start of the ranks ended
        self._code_elsewhere: int | None = None  # by which ranks of other nodes ended the job

    def end_without_others(self, error: Exception) -> None:
        """Decide how the job ended if the nodes cannot meet or the store's host is gone."""
        codes = self._exit_codes().values() if self._pcontext else ()
        self.exit_code = max((code for code in codes if code), default=0)
        if self.exit_code <= 0 and self._code_elsewhere is not None:
            self.exit_code = self._code_elsewhere
        elif self.exit_code <= 0:
            self.exit_code = EXIT_FAILED
            reason = " ".join(str(error).split())
            tell(f"error: the nodes cannot meet, or have lost each other: {reason}")

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other nodes and agree on a name for this start of the ranks."""
        with self._stop.listening():
            self._stop.heed()
            super()._rendezvous(worker_group)
            store: Any = worker_group.store
            if worker_group.group_rank == 0:
                store.set(ATTEMPT, uuid.uuid4().hex)
            os.environ[ATTEMPT] = store.get(ATTEMPT).decode()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        handle_stop_signals(self._note)
        os.environ[LAUNCHER] = str(os.getpid())
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGRTMAX"  # so torch handles none of ours
        self._stop.began(
            lambda: "between two starts of the ranks; the same command continues the run"
        )
        self._code_elsewhere, self._over = None, False
        started = super()._start_workers(worker_group)
        if self._has_other_nodes():
            watch = threading.Thread(target=self._watch_job, name="job-watch", daemon=True)
            watch.start()
        return started

    def _has_other_nodes(self) -> bool:
        return (self._worker_group.group_world_size or 1) > 1

    def _watch_job(self) -> None:
        """Notice that the job has ended elsewhere, if all ranks of this node are stopped."""
        attempt, channel = os.environ[ATTEMPT], self._visited_channel()
        while channel is not None and not channel.gone:
            code = channel.code_of_others()
            if os.environ[ATTEMPT] != attempt:  # the ranks have been started again
                return
            if code is not None:
                self._code_elsewhere = code
                return
            time.sleep(_WATCH_SECONDS)

    def _visited_channel(self) -> FailureChannel | None:
        """The channel of the ranks; None if their store is gone."""
        group = self._worker_group
        with suppress(RuntimeError, OSError):
            store = visit_store(
                str(group.master_addr), int(group.master_port or 0), os.environ[ATTEMPT]
            )
            return FailureChannel(store)
        return None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """End the ranks within the time of the flag, which torch 2.11 would not give them."""
        if self._pcontext is not None:
            self._pcontext.close(death_sig, self._shutdown_timeout)
        super()._shutdown(death_sig)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pass_signals_on()
        codes = self._exit_codes().values()
        if any(codes) or self._code_elsewhere is not None:
            if not self._over:  # a rank that was killed there may take a moment to be gone
                self._end()
        elif None in codes:
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED:
            self.exit_code = 0
        return result

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked.append((signal.Signals(number), time.monotonic()))
        self._stop.signal = number

    def _pass_signals_on(self) -> None:
        for number, when in self._asked[self._passed_on :]:
            self._passed_on += 1
            self._send(number)
            interrupts = [at for each, at in self._asked if each == signal.SIGINT]
            if number == signal.SIGINT and when - interrupts[0] > _ONE_CTRL_C_SECONDS:
                self._kill("interrupted twice: the ranks were killed, and have not saved")
            elif number == signal.SIGINT and len(interrupts) == 1 and sys.stderr.isatty():
                tell("stopping: the run saves after its step (Ctrl-C again: at once, unsaved)")
        if self._asked and time.monotonic() > self._asked[0][1] + self._shutdown_timeout:
            self._kill(
                f"error: the ranks did not leave within {self._shutdown_timeout} s of "
                f"{self._asked[0][0].name} (--shutdown-timeout) and were killed"
            )

    def _end(self) -> None:
        """Wait for the other ranks after one has failed, and decide how the job ended."""
        self._over = True
        lost = self._lost()
        if lost and not self._killed:
            self._claim_lost(lost)
        begun = time.monotonic()
        while None in self._exit_codes().values() and time.monotonic() < begun + _PATIENCE_SECONDS:
            time.sleep(0.05)
        if self._has_other_nodes():
            time.sleep(max(0.0, begun + _SERVE_SECONDS - time.monotonic()))
        self._send(signal.SIGKILL)
        told = [code for code in self._exit_codes().values() if code is not None and code > 0]
        if not (lost or self._killed):
            self.exit_code = max(told, default=0) or self._code_elsewhere or self._stopped_early()
        if self.exit_code in FINAL or self._asked:
            self._remaining_restarts = 0
        elif self._remaining_restarts > 0:
            most = self._worker_group.spec.max_restarts
            tell(f"starting again: restart {most - self._remaining_restarts + 1} of {most}")

    def _lost(self) -> dict[int, signal.Signals]:
        """The signal that killed each lost rank, except signals that were passed on."""
        ours = {number for number, _ in self._asked}
        return {
            local_rank: signal.Signals(-code)
            for local_rank, code in self._exit_codes().items()
            if code is not None and code < 0 and -code not in ours
        }

    def _claim_lost(self, lost: dict[int, signal.Signals]) -> None:
        """Report ranks that were killed, and tell the others that this is reported."""
        (local_rank, number), *_ = lost.items()
        self.exit_code = 128 + number
        group, channel = self._worker_group, self._visited_channel()
        if channel is not None:
            channel.claim(self.exit_code)
        process = self._processes()[local_rank]
        why = ", as the kernel does when memory is full" if number == signal.SIGKILL else ""
        tell(
            f"error: rank {group.workers[local_rank].global_rank} (process {process.pid} on "
            f"{socket.gethostname()}) was killed by {number.name}{why}; the other ranks cannot "
            "continue without it"
        )

    def _stopped_early(self) -> int:
        """The exit code if the signal came before the ranks handled signals."""
        number = self._asked[0][0]
        tell(f"stopped by {number.name} before training began; there was nothing to save")
        return EXIT_CTRL_C if number == signal.SIGINT else EXIT_INTERRUPTED

    def _kill(self, message: str) -> None:
        if not self._killed:
            tell(message)
            self._killed = True
            twice = message.startswith("interrupted")
            self.exit_code = EXIT_CTRL_C if twice else EXIT_KILLED
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        """Send the signal to each rank; SIGKILL also to the processes that the rank started."""
        for process in self._processes().values():
            with suppress(ProcessLookupError, PermissionError):
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)

    def _exit_codes(self) -> dict[int, int | None]:
        """By local rank: the exit code, the negative signal number, or None while it runs."""
        return {rank: process.poll() for rank, process in self._processes().items()}

    def _processes(self) -> dict[int, Any]:
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        return {rank: each.proc for rank, each in context.subprocess_handlers.items()}
