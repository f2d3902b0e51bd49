"""Where records go: one interface, and the one object that the training loop talks to."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Protocol

from moe_parallel.errors import InputError
from moe_parallel.telemetry.console import Console, open_console
from moe_parallel.telemetry.metrics import MetricsWriter, Record
from moe_parallel.telemetry.wandb_sink import WandbSink


class Sink(Protocol):
    """Takes the records of a run; metrics.py says what is in one."""

    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Telemetry:
    """Fans records out. On the ranks that report nothing: `Telemetry()`.

    telemetry.advance(iteration)      every iteration
    telemetry.log(record)             every logged iteration and every evaluation
    telemetry.say("saved ...")        a line that does not break the bar
    telemetry.close()                 or use it as a context manager
    """

    def __init__(self, console: Console | None = None, *sinks: Sink) -> None:
        self._console = console
        self._sinks = sinks

    def advance(self, iteration: int) -> None:
        if self._console is not None:
            self._console.advance(iteration)

    def say(self, text: str) -> None:
        if self._console is not None:
            self._console.say(text)

    def log(self, record: Record) -> None:
        for sink in self._sinks:
            sink.log(record)
        if self._console is not None:
            self._console.log(record)

    def close(self) -> None:
        """Closes all of them, even if closing one fails."""
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
            if self._console is not None:
                stack.callback(self._console.close)  # first, so that the terminal is free again

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_telemetry(
    directory: Path | str | None,
    train_iters: int,
    *,
    resumed_from: int | None = None,
    tensorboard: bool = True,
    wandb_project: str | None = None,
    wandb_mode: str = "offline",
    config: dict[str, Any] | None = None,
) -> Telemetry:
    """The telemetry of a run, for the one rank that reports.

    `directory`: of --save; None writes no files, only to the console. `resumed_from`: the iteration
    of the loaded checkpoint, None for a new run. `config`: shown by Weights & Biases.

    Raises InputError when the folder cannot be written, or W&B is asked for and missing.
    """
    if directory is None and wandb_project is not None:
        raise InputError(f"--wandb-project {wandb_project}: needs a folder: give --save DIR")
    with contextlib.ExitStack() as opened:
        sinks: list[Sink] = []

        def add(sink: Sink) -> None:
            opened.callback(sink.close)
            sinks.append(sink)

        if directory is not None:
            add(MetricsWriter(directory, resumed_from))
            if tensorboard:
                # Imported here because it takes seconds, which the other ranks need not spend.
                from moe_parallel.telemetry.tensorboard_sink import TensorBoardSink

                add(TensorBoardSink(directory, resumed_from))
            if wandb_project is not None:
                resumed = resumed_from is not None
                add(WandbSink(directory, wandb_project, wandb_mode, resumed, config or {}))
        opened.pop_all()  # nothing failed: the caller closes them
    return Telemetry(open_console(train_iters, first=resumed_from or 0), *sinks)
