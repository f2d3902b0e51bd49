"""metrics.jsonl: the record of a run, one JSON object per line.

Every logged iteration has: iteration, lm_loss, grad_norm, learning_rate, tokens_per_second,
peak_memory_bytes (so far, of the rank that used most: on its GPU, or resident on the host),
consumed_tokens, consumed_samples, elapsed_seconds (since this process began to train),
save_seconds (for which rank 0 stood still for checkpoints since the line before), `ranks` (the
times of all ranks: `stragglers.summary`), `layers`, the list of `RoutingTotals.summaries()`,
`machine`: {tflops_per_device, mfu, joules_per_token, and the QUANTITIES of gauges.py}, in which
what is not known is missing, and with expert parallelism `rank_load` (`rank_load.rank_load`).
Evaluations have `validation`: {domain: {loss, bits_per_byte, layers}}, where `layers` has the
routing statistics of that domain's text. With --eval-first-part, or if the system routes segments,
they also have loss_after_first_part. If a workload chooses the experts, every record has
forced_routing, its name. If a controller sets a number for all layers, every logged iteration has
it for the next step (l1_coefficient of relu, balance_coefficient of routing_free, top_p of top_p
with --moe-top-p-target-experts), and experts_per_token, the mean over the layers. Losses are in
nats per token. A number that is not finite is written as null: JSON has no NaN.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_parallel.errors import InputError
from moe_parallel.reading import parse_json, read_lines

METRICS_FILE = "metrics.jsonl"
PREVIOUS_NAME = "metrics.previous.jsonl"

#: The fields of a record that depend on the machine and differ between any two runs.
TIMING = (
    "elapsed_seconds", "save_seconds", "tokens_per_second", "peak_memory_bytes", "ranks", "machine",
)  # fmt: skip

MetricsLine = dict[str, Any]

#: The auxiliary losses that a layer may have, by their names in `layers`.
_LOSSES = [
    "load_balancing_loss",
    "importance_loss",
    "z_loss",
    "entropy_loss",
    "erc_loss",
    "erc_norm",  # not a loss: the mean norm that erc_loss compares with others
    "l1_loss",
    "routing_free_loss",
]


def loss_names() -> tuple[str, ...]:
    """The names of all auxiliary losses, those of `register_loss` last."""
    return tuple(_LOSSES)


def register_loss(name: str) -> str:
    """Add an auxiliary loss to those that `layers` may have; returns its name.

    Call it when the system is registered, before a model is built. Raises ValueError if another
    loss has the name, or if the name does not end in `_loss`, by which reports know a loss.
    """
    if not name.endswith("_loss"):
        raise ValueError(f"{name!r} is not the name of a loss: let it end in _loss")
    if name in _LOSSES:
        raise ValueError(f"the name {name!r} already belongs to another loss: choose another")
    _LOSSES.append(name)
    return name


def read_metrics(path: Path | str) -> list[MetricsLine]:
    """The records of a metrics.jsonl, in the order written.

    An incomplete last line, left by a crash, is left out. An incomplete line anywhere else, or a
    file that cannot be read, raises InputError.
    """
    return [record for record, _ in _records(Path(path))]


def has_evaluation(directory: Path | str, iteration: int) -> bool:
    """Whether the metrics in a run's folder have an evaluation of this iteration."""
    path = Path(directory) / METRICS_FILE
    return path.is_file() and any(
        record["iteration"] == iteration and "validation" in record for record, _ in _records(path)
    )


def untimed(record: MetricsLine) -> MetricsLine:
    """The fields that a continued run logs again exactly, as read from the file."""
    return {key: _finite(value) for key, value in record.items() if key not in TIMING}


@dataclass(frozen=True)
class Resumed:
    """The content of metrics.jsonl for a run that continues.

    Attributes:
        last: the records of the checkpoint's iteration.
        cut: the later records, which the run will produce again.
        end: the iteration of the last record that stays; 0: there is none.
    """

    last: Sequence[MetricsLine] = ()
    cut: Sequence[MetricsLine] = ()
    end: int = 0


class Journal:
    """Appends entries to a file, each completely or not at all.

    If a write fails (the disk is full, over quota, or gone), the partial entry is removed, kept in
    memory and written again with the next entry. So an incomplete entry never precedes a complete
    one. At most the `KEPT` latest entries wait in memory.
    """

    KEPT = 1000

    def __init__(self, path: Path) -> None:
        """Creates the file if necessary. Raises OSError."""
        self._file = path.open("ab", buffering=0)
        self._end = path.stat().st_size  # the end of the last complete entry
        self._waiting: deque[bytes] = deque(maxlen=self.KEPT)

    def append(self, entry: bytes) -> None:
        """On return the operating system has the entry. Raises OSError if it waits instead."""
        self._waiting.append(entry)
        self._write()

    def sync(self) -> None:
        """Wait until everything is on the disk. Raises OSError."""
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. Raises OSError if entries are lost."""
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        self._file.truncate(self._end)  # of what an error, or Ctrl-C, has left of an entry
        while self._waiting:
            try:
                self._write_whole(self._waiting[0])
            except OSError:
                with contextlib.suppress(OSError):  # if this fails, the next entry does it
                    self._file.truncate(self._end)
                raise
            self._end += len(self._waiting.popleft())

    def _write_whole(self, entry: bytes) -> None:
        rest = memoryview(entry)
        while rest:
            rest = rest[self._file.write(rest) :]


class MetricsWriter:
    """Appends records to `directory`/metrics.jsonl; each is in the file when `log` returns."""

    def __init__(
        self, directory: Path | str, resumed_from: int | None = None, logged: int = 0
    ) -> None:
        """Creates the folder if necessary.

        `resumed_from`: the iteration of the checkpoint from which the run continues. Later records
        and an incomplete last line are cut, so that each record is there once; `resumed` has the
        later records. None: a new run; the metrics of another run in the same folder are moved to
        metrics.previous.jsonl. `logged`: the last iteration that the run has logged before that
        checkpoint; `warning` tells if its record is not there. Raises OSError, and InputError if
        the file is not a log.
        """
        path = Path(directory) / METRICS_FILE
        self.name = str(path)
        self.resumed = Resumed()
        self.warning: str | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if resumed_from is None:
                path.replace(path.with_name(PREVIOUS_NAME))
            else:
                self.resumed = _cut_after(path, resumed_from)
        if resumed_from is not None and self.resumed.end < logged:
            end = self.resumed.end
            self.warning = (
                f"{path} {f'ends at iteration {end}' if end else 'is missing or empty'}, and the "
                f"run goes on after {resumed_from}: the records between are lost"
            )
        self._journal = Journal(path)

    def log(self, record: MetricsLine) -> None:
        """Raises OSError if the record has to wait; see `Journal`."""
        self._journal.append((json.dumps(_finite(record), allow_nan=False) + "\n").encode())

    def sync(self) -> None:
        self._journal.sync()

    def close(self) -> None:
        self._journal.close()


def _records(path: Path) -> Iterator[tuple[MetricsLine, int]]:
    """Each record, and the number of bytes up to the end of its line."""
    end = 0
    try:
        for number, line in enumerate(read_lines(path), start=1):
            end += len(line)
            record = _record(line, f"{path}: line {number}") if line.strip() else None
            if record is not None:
                yield record, end
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: name the folder of a run") from error


def _record(line: bytes, place: str) -> MetricsLine | None:
    """The record; None if the line has no end, so was being written. `place`: for messages."""
    try:
        record = parse_json(line)
    except ValueError as error:
        if not line.endswith(b"\n"):
            return None
        raise InputError(f"{place} is damaged ({error}): delete that line") from error
    if not isinstance(record, dict) or type(record.get("iteration")) is not int:
        raise InputError(f"{place} has no `iteration`: is it a metrics.jsonl?")
    return record


def _cut_after(path: Path, iteration: int) -> Resumed:
    """End the file after the last record of `iteration` or before; cut an incomplete last line too.

    The file is cut in place, in one step, which needs no disk space.
    """
    last: list[MetricsLine] = []
    cut: list[MetricsLine] = []
    kept = last_iteration = 0
    for record, end in _records(path):
        if record["iteration"] > iteration or cut:
            cut.append(record)
        else:
            kept, last_iteration = end, record["iteration"]
            if record["iteration"] == iteration:
                last.append(record)
    with path.open("r+b") as file:
        file.truncate(kept)
        file.seek(max(0, kept - 1))
        if file.read() not in (b"", b"\n"):  # the last line lacks only its end
            file.write(b"\n")
    return Resumed(last, cut, last_iteration)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
