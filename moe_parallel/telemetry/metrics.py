"""metrics.jsonl: the record of a run, a JSON object a line.

Every logged iteration: iteration, lm_loss, grad_norm, learning_rate, tokens_per_second,
peak_memory_bytes (so far, of the rank that has held most: on its GPU, or resident on the host),
consumed_tokens, consumed_samples, elapsed_seconds (since this process began to train) and `layers`,
the list of `RoutingTotals.summaries()`. On evaluations `validation`: {domain: {loss,
bits_per_byte, layers}}, where `layers` says how that domain's text was routed, and, with
--eval-first-part or where whole segments are routed, loss_after_first_part.
Losses are in nats a token. A number that is not finite is written as null: JSON has no NaN.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from moe_parallel.errors import InputError

FILE_NAME = "metrics.jsonl"
PREVIOUS_NAME = "metrics.previous.jsonl"

Record = dict[str, Any]


def read_metrics(path: Path | str) -> list[Record]:
    """The records of a metrics.jsonl, in the order written.

    A last line that a crash tore is left out; a torn line anywhere else, or a file that cannot be
    read, raises InputError.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: name the folder of a run") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline after it: it was being written
                break
            raise InputError(f"{path}: line {number} is not JSON: delete that line") from error
        if not isinstance(record, dict) or "iteration" not in record:
            raise InputError(f"{path}: line {number} has no `iteration`: is it a metrics.jsonl?")
        records.append(record)
    return records


def keep_until(path: Path, iteration: int) -> None:
    """Cuts the records after `iteration` and a torn last line; the file is replaced in one step."""
    kept = [record for record in read_metrics(path) if record["iteration"] <= iteration]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(_line(record) for record in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class MetricsWriter:
    """Appends records to `directory`/metrics.jsonl; each is on disk when `log` returns."""

    def __init__(self, directory: Path | str, resumed_from: int | None = None) -> None:
        """Makes the folder if need be.

        `resumed_from`: the iteration of the checkpoint that the run goes on from; later records are
        cut, so that each iteration is there once. None: a new run; the metrics of another run in
        the same folder are moved to metrics.previous.jsonl.
        """
        self.path = Path(directory) / FILE_NAME
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                if resumed_from is None:
                    self.path.replace(self.path.with_name(PREVIOUS_NAME))
                else:
                    keep_until(self.path, resumed_from)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._cannot_write(error) from error

    def log(self, record: Record) -> None:
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        self._file.close()

    def _cannot_write(self, error: OSError) -> InputError:
        return InputError(
            f"--save {self.path.parent}: cannot write {FILE_NAME} ({error.strerror}): "
            "free space, or save in another folder"
        )


def _line(record: Record) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
