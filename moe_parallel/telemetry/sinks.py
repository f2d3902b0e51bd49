"""The destinations of records: their interface, and the one object that the training loop uses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from moe_parallel.collective_errors import one_line
from moe_parallel.errors import InputError
from moe_parallel.telemetry.console import PlainConsole, open_console
from moe_parallel.telemetry.metrics import MetricsLine, MetricsWriter
from moe_parallel.telemetry.wandb_sink import WandbSink

CONSOLE = "standard output"


class Sink(Protocol):
    """Receives the records of a run, which metrics.py describes.

    `name` is the name for users. Each method raises OSError if the log cannot be written.
    """

    name: str

    def log(self, record: MetricsLine) -> None: ...

    def sync(self) -> None:
        """Returns when everything is on the disk."""

    def close(self) -> None: ...


class Telemetry:
    """Sends records to all sinks. On ranks that report nothing: `Telemetry()`.

    telemetry.advance(iteration)      every iteration
    telemetry.log(record)             every logged iteration and every evaluation
    telemetry.say("saved ...")        a line that does not break the bar
    telemetry.sync()                  before a checkpoint, which assumes that the log is on disk
    telemetry.close()                 or use it as a context manager

    A log that cannot be written does not end the run; a line is printed the first time.
    """

    def __init__(self, console: PlainConsole | None = None, *sinks: Sink) -> None:
        self._console = console
        self._sinks = sinks
        self._failed: set[str] = set()

    def advance(self, iteration: int) -> None:
        if self._console is not None:
            self._attempt(CONSOLE, self._console.advance, iteration)

    def say(self, text: str) -> None:
        if self._console is not None:
            self._attempt(CONSOLE, self._console.say, text)

    def log(self, record: MetricsLine) -> None:
        for sink in self._sinks:
            self._attempt(sink.name, sink.log, record)
        if self._console is not None:
            self._attempt(CONSOLE, self._console.log, record)

    def sync(self) -> None:
        for sink in self._sinks:
            self._attempt(sink.name, sink.sync)

    def close(self) -> None:
        """Closes all sinks, even if closing one fails."""
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(self._attempt, sink.name, sink.close)
            if self._console is not None:  # first, to release the terminal
                stack.callback(self._attempt, CONSOLE, self._console.close)

    def _attempt(self, name: str, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            if name not in self._failed:
                self._failed.add(name)
                self._complain(
                    f"warning: cannot write {name}: {one_line(error)}; training continues"
                )

    def _complain(self, text: str) -> None:
        if self._console is not None and CONSOLE not in self._failed:
            self.say(text)
        else:
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_telemetry(
    directory: Path | str | None,
    train_iters: int,
    *,
    first: int = 0,
    resumed_from: int | None = None,
    logged: int = 0,
    tensorboard: bool = True,
    wandb_project: str | None = None,
    wandb_mode: str = "offline",
    config: dict[str, Any] | None = None,
) -> Telemetry:
    """The telemetry of a run, for the one rank that reports.

    `directory`: of --save; None writes only to the console. `first`: number of iterations already
    done. `resumed_from`: the iteration of the loaded checkpoint if the logs in `directory` are of
    the same run and are continued; None: they start anew. `logged`: the last iteration that the run
    has logged before it. `config`: shown by Weights & Biases.

    Raises InputError if the folder cannot be written, or if W&B is requested but not installed.
    """
    if directory is None and wandb_project is not None:
        raise InputError(f"--wandb-project {wandb_project}: needs a folder: give --save DIR")
    with contextlib.ExitStack() as opened:
        sinks: list[Sink] = []
        warning = None

        def add(sink: Sink) -> None:
            opened.callback(sink.close)
            sinks.append(sink)

        if directory is not None:
            with _writing_to(directory):
                metrics = MetricsWriter(directory, resumed_from, logged)
                warning = metrics.warning
                opened.callback(metrics.close)
                if tensorboard:
                    # Imported here because it takes seconds, which the other ranks can save.
                    from moe_parallel.telemetry.tensorboard_sink import TensorBoardSink

                    add(TensorBoardSink(directory, resumed_from, metrics.resumed.last))
                if wandb_project is not None:
                    add(
                        WandbSink(
                            directory,
                            wandb_project,
                            wandb_mode,
                            None if resumed_from is None else metrics.resumed.cut,
                            config or {},
                        )
                    )
                sinks.append(metrics)  # last: the others then have every record that it has
        opened.pop_all()  # nothing failed, so the caller closes them
    telemetry = Telemetry(open_console(train_iters, first), *sinks)
    if warning is not None:
        telemetry.say(f"warning: {warning}")
    return telemetry


@contextlib.contextmanager
def _writing_to(directory: Path | str) -> Iterator[None]:
    """Refuse a folder that cannot be written at the start, when nothing is lost yet."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--save {directory}: cannot write the logs ({one_line(error)}): "
            "free space, or save in another folder"
        ) from error
