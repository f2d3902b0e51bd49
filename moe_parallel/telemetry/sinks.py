"""Where the records of a run go: TensorBoard, Weights & Biases, and all sinks as one object."""

from __future__ import annotations

import contextlib
import io
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moe_parallel.collective_errors import one_line
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import read_word
from moe_parallel.telemetry.console import PlainConsole, open_console
from moe_parallel.telemetry.metrics import Journal, MetricsLine, MetricsWriter, loss_names, untimed
from moe_parallel.telemetry.statistics import load_shares

CONSOLE = "standard output"
BINS = 30  # of a histogram
RUN_ID_FILE = "wandb_run_id.txt"

#: The single numbers that a layer may report, besides its losses.
MEASURES = (
    "ent_load",
    "ent_conf",
    "max_minus_min_load",
    "tokens_dropped",
    "experts_per_token",
    "utilisation",
    "wire_bytes_per_token",
    "output_rms",
)


#: The values that a layer reports per expert, by their names in a record: the names in charts.
PER_EXPERT = {
    "norm_per_expert": "norm",
    "cutoff_per_expert": "cutoff",
    "routing_weight_per_expert": "routing_weight",
}


def scalars(record: MetricsLine) -> dict[str, float]:
    """The finite numbers of a record by name, grouped by the part before the first slash.

    train/lm_loss, machine/mfu, validation/code/bits_per_byte, moe/layer_03/ent_load,
    moe/layer_03/imbalance (load of the busiest expert over the mean load: 1 is even); and over all
    layers moe/ent_load and moe/ent_conf (means), moe/max_minus_min_load and moe/tokens_dropped
    (sums), moe/imbalance_mean and moe/imbalance_max; and moe/rank_overload (`rank_load`).
    """
    special = ("iteration", "layers", "validation", "machine")
    named = {f"train/{key}": value for key, value in record.items() if key not in special}
    named |= {f"machine/{name}": value for name, value in record.get("machine", {}).items()}
    for domain, measures in record.get("validation", {}).items():
        named |= {f"validation/{domain}/{name}": value for name, value in measures.items()}
    if "rank_load" in record:
        named["moe/rank_overload"] = record["rank_load"]["overload"]
    layers = record.get("layers", [])
    imbalances = [max(_relative_load(layer)) for layer in layers]
    for layer, imbalance in zip(layers, imbalances, strict=True):
        known = (measure for measure in (*MEASURES, *loss_names()) if measure in layer)
        named |= {f"{_place(layer)}/{measure}": layer[measure] for measure in known}
        named[f"{_place(layer)}/imbalance"] = imbalance
    if layers:
        for name in ("ent_load", "ent_conf", "max_minus_min_load", "tokens_dropped"):
            total = sum(layer[name] for layer in layers)
            named[f"moe/{name}"] = total / len(layers) if name.startswith("ent_") else total
        named["moe/imbalance_mean"] = sum(imbalances) / len(layers)
        named["moe/imbalance_max"] = max(imbalances)
    return {
        name: float(value)
        for name, value in named.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def histograms(record: MetricsLine) -> dict[str, list[float]]:
    """One finite number per expert of a layer, by name.

    moe/layer_03/load (choices over the mean of the experts: 1 is even), and if the layer has them
    moe/layer_03/norm, moe/layer_03/cutoff and moe/layer_03/routing_weight. One chart per expert
    would be thousands of charts.
    """
    found = {}
    for layer in record.get("layers", []):
        named = {name: layer[key] for key, name in PER_EXPERT.items() if key in layer}
        for name, values in {"load": _relative_load(layer), **named}.items():
            if finite := [x for x in values if x is not None and math.isfinite(x)]:
                found[f"{_place(layer)}/{name}"] = finite
    return found


def _place(layer: dict[str, Any]) -> str:
    return f"moe/layer_{layer['layer']:02d}"


def _relative_load(layer: dict[str, Any]) -> list[float]:
    shares = load_shares(layer["tokens_per_expert"])
    return [share * len(shares) for share in shares]


class Sink(Protocol):
    """Receives the records of a run, which metrics.py describes.

    `name` is the name for users. Each method raises OSError if the log cannot be written.
    """

    name: str

    def log(self, record: MetricsLine) -> None: ...

    def sync(self) -> None:
        """Returns when everything is on the disk."""

    def close(self) -> None: ...


class TensorBoardSink:
    """Writes `scalars` and `histograms` of every record to `directory`/tensorboard.

    torch's SummaryWriter writes in a separate thread, which ends at the first error, including a
    full disk, and reports it only at a later call. Here each record is in the file when `log`
    returns, or waits as in metrics.jsonl.
    """

    def __init__(
        self,
        directory: Path | str,
        resumed_from: int | None = None,
        last: Sequence[MetricsLine] = (),
    ) -> None:
        """`resumed_from`: as in MetricsWriter. TensorBoard hides the folder's values from that
        iteration on and shows `last` instead, the records of that iteration in metrics.jsonl. So
        each value is there once, wherever the run was stopped. Raises OSError."""
        folder = Path(directory) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self.name = str(folder)
        # TensorBoard reads the files of a folder in the order of their names.
        place = f"{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._journal = Journal(folder / f"events.out.tfevents.{place}")
        # Imported here because it takes seconds, which the other ranks can save.
        from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
            RecordWriter,
        )
        from torch.utils.tensorboard import summary

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._histogram, self._writer = summary.histogram, RecordWriter
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._append(
            self._event(file_version="brain.Event:2"),
            self._event(step=resumed_from or 0, session_log=start),
        )
        for record in last:
            self.log(record)

    def log(self, record: MetricsLine) -> None:
        """Raises OSError if the record has to wait; see `Journal`."""
        value = self._summary.Value
        values = [value(tag=tag, simple_value=x) for tag, x in scalars(record).items()]
        for tag, numbers in histograms(record).items():
            values += self._histogram(tag, np.array(numbers), BINS).value
        self._append(self._event(step=record["iteration"], summary=self._summary(value=values)))

    def _append(self, *events: Any) -> None:
        entry = io.BytesIO()
        for event in events:
            event.wall_time = time.time()
            self._writer(entry).write(event.SerializeToString())
        self._journal.append(entry.getvalue())

    def sync(self) -> None:
        self._journal.sync()

    def close(self) -> None:
        self._journal.close()


class WandbSink:
    """Logs `scalars` and `histograms` of every record to one W&B run, under `directory`/wandb.

    The id of the run is stored in `directory`/wandb_run_id.txt, so that a resumed run continues the
    same curves. The x axis is `iteration`, because W&B's own step cannot go back to a checkpoint.
    W&B cannot take a value back either, so values that were sent before are not sent again.
    """

    def __init__(
        self,
        directory: Path | str,
        project: str,
        mode: str,
        told: Sequence[MetricsLine] | None,
        config: dict[str, Any],
    ) -> None:
        """`mode`: online, offline (upload later with `wandb sync`) or disabled.

        `told`: for a run that continues, the records after the checkpoint, which it will produce
        again; None: a new run. Raises InputError if wandb is not installed or refuses to start.
        """
        wandb = import_optional("wandb", f"--wandb-project {project}")
        directory = Path(directory)
        self.name = str(directory / "wandb")
        self._wandb = wandb
        self._told = [untimed(record) for record in told or ()]
        try:
            self._run = wandb.init(
                project=project,
                name=directory.name,
                dir=str(directory),
                mode=mode,
                id=_run_id(directory / RUN_ID_FILE, resumed=told is not None),
                resume="allow",
                config=config,
                settings=wandb.Settings(silent=True),  # its messages would disturb the progress bar
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"--wandb-mode {mode}: wandb did not start ({reason}): "
                "run `wandb login`, or use --wandb-mode offline"
            ) from error
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, record: MetricsLine) -> None:
        """Raises OSError for every error of wandb."""
        if untimed(record) in self._told:
            return
        values = {name: self._wandb.Histogram(of) for name, of in histograms(record).items()}
        with _as_oserror():
            self._run.log({"iteration": record["iteration"], **scalars(record), **values})

    def sync(self) -> None:
        """Does nothing: wandb's separate process decides when to write."""

    def close(self) -> None:
        with _as_oserror():
            self._run.finish()


@contextlib.contextmanager
def _as_oserror() -> Iterator[None]:
    """Convert any error to an OSError; the errors of wandb's process have no common type."""
    try:
        yield
    except Exception as error:
        raise OSError(" ".join(str(error).split()) or type(error).__name__) from error


def _run_id(path: Path, *, resumed: bool) -> str:
    known = read_word(path) if resumed and path.exists() else ""
    if known:  # a full disk may have left the file empty
        return known
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n")
    return run_id


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
        if self._console is not None:  # first, to release the terminal
            self._attempt(CONSOLE, self._console.close)
        for sink in self._sinks:
            self._attempt(sink.name, sink.close)

    def _attempt(self, name: str, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            if name in self._failed:
                return
            self._failed.add(name)
            text = f"warning: cannot write {name}: {one_line(error)}; training continues"
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
    sinks: list[Sink] = []
    warning = None
    if directory is not None:
        try:
            metrics = MetricsWriter(directory, resumed_from, logged)
            warning = metrics.warning
            if tensorboard:
                sinks.append(TensorBoardSink(directory, resumed_from, metrics.resumed.last))
            if wandb_project is not None:
                told = None if resumed_from is None else metrics.resumed.cut
                sinks.append(WandbSink(directory, wandb_project, wandb_mode, told, config or {}))
        except OSError as error:  # at the start, when nothing is lost yet
            raise InputError(
                f"--save {directory}: cannot write the logs ({one_line(error)}): "
                "free space, or save in another folder"
            ) from error
        sinks.append(metrics)  # last: the others then have every record that it has
    telemetry = Telemetry(open_console(train_iters, first), *sinks)
    if warning is not None:
        telemetry.say(f"warning: {warning}")
    return telemetry
