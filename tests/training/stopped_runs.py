"""Runs that end at a chosen moment, on the rank of a test; the disk is left as after kill -9.

    moments = with_moments(options, None)           # the names of all moments of the run, in order
    with_moments(options, 7)                        # the run, ended at the eighth moment

The moments are before and after each step, record, evaluation of a domain, checkpoint, publication
of a checkpoint, and the figure; and in the middle of a line of metrics.jsonl.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from moe_parallel.telemetry import metrics
from moe_parallel.telemetry.metrics import Journal, MetricsWriter
from moe_parallel.telemetry.sinks import TensorBoardSink
from moe_parallel.training import loop, pretrain
from moe_parallel.training.checkpoint.checkpointer import Checkpointer
from moe_parallel.training.checkpoint.folder import CheckpointFolder
from moe_parallel.training.engine import Engine
from moe_parallel.training.signals import Stopped
from tests.program import Options, pretrain_here

PLACES = [
    (Engine, "step"),
    (MetricsWriter, "log"),
    (TensorBoardSink, "log"),
    (loop, "measure_text_loss"),
    (Checkpointer, "save"),
    (CheckpointFolder, "publish"),
    (pretrain, "write_figure"),
]


class Killed(BaseException):
    """Nothing runs after it: no handler in the program catches it."""


class Moments:
    """Counts the moments of a run and performs an action at one of them.

    A closed journal does not write its pending entries.
    """

    def __init__(self, at: int | None, action: Callable[[], None]) -> None:
        self.at, self.action = at, action
        self.names: list[str] = []

    def pass_by(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) - 1 == self.at:
            self.action()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with contextlib.ExitStack() as patches:
            for owner, name in PLACES:
                patches.enter_context(mock.patch.object(owner, name, self._around(owner, name)))
            write = Journal._write_whole

            def write_in_two(journal: Journal, entry: bytes) -> None:
                if journal._file.name.endswith(metrics.METRICS_FILE):
                    half = len(entry) // 2
                    write(journal, entry[:half])
                    self.pass_by("half a line")
                    entry = entry[half:]
                write(journal, entry)

            patches.enter_context(mock.patch.object(Journal, "_write_whole", write_in_two))
            patches.enter_context(
                mock.patch.object(Journal, "close", lambda journal: journal._file.close())
            )
            yield

    def _around(self, owner: Any, name: str) -> Callable[..., Any]:
        plain = getattr(owner, name)
        label = f"{getattr(owner, '__name__', '').split('.')[-1]}.{name}"

        def around(*args: Any, **kwargs: Any) -> Any:
            self.pass_by(f"before {label}")
            result = plain(*args, **kwargs)
            self.pass_by(f"after {label}")
            return result

        return around


def kill() -> None:
    raise Killed


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def with_moments(
    options: Options, at: int | None, action: Callable[[], None] = kill
) -> tuple[list[str], int | None]:
    """(names of the reached moments, exit code or None if the run has none)."""
    moments = Moments(at, action)
    with moments.watched():
        try:
            ((code, _),) = pretrain_here([options])
        except (Killed, Stopped):
            code = None
    return moments.names, code


def kill_in_step(number: int) -> None:
    """From now on this process is killed in the step of that number, counted from 1."""
    step, begun = Engine.step, []

    def step_or_die(*given: Any) -> Any:
        begun.append(None)
        if len(begun) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*given)

    Engine.step = step_or_die  # type: ignore[method-assign]
