"""TensorBoard event files in a run's folder."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard import summary

from moe_parallel.telemetry.journal import Journal
from moe_parallel.telemetry.metrics import MetricsLine
from moe_parallel.telemetry.scalars import histograms, scalars

BINS = 30


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
        session = SessionLog(status=SessionLog.START)
        begin = io.BytesIO()
        _write(begin, Event(file_version="brain.Event:2"))
        _write(begin, Event(step=resumed_from or 0, session_log=session))
        self._journal.append(begin.getvalue())
        for record in last:
            self.log(record)

    def log(self, record: MetricsLine) -> None:
        """Raises OSError if the record has to wait; see `Journal`."""
        values = [Summary.Value(tag=tag, simple_value=x) for tag, x in scalars(record).items()]
        for tag, numbers in histograms(record).items():
            values += summary.histogram(tag, np.array(numbers), BINS).value
        entry = io.BytesIO()
        _write(entry, Event(step=record["iteration"], summary=Summary(value=values)))
        self._journal.append(entry.getvalue())

    def sync(self) -> None:
        self._journal.sync()

    def close(self) -> None:
        self._journal.close()


def _write(stream: io.BytesIO, event: Event) -> None:
    event.wall_time = time.time()
    RecordWriter(stream).write(event.SerializeToString())
