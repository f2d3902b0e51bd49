"""TensorBoard event files in a run's folder."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from moe_parallel.telemetry.metrics import Record
from moe_parallel.telemetry.scalars import scalars


class TensorBoardSink:
    """Writes `scalars` of every record to `directory`/tensorboard."""

    def __init__(self, directory: Path | str, resumed_from: int | None = None) -> None:
        """`resumed_from`: as for MetricsWriter; TensorBoard hides what the folder has after it."""
        purge_step = 0 if resumed_from is None else resumed_from + 1
        self._writer = SummaryWriter(str(Path(directory) / "tensorboard"), purge_step=purge_step)

    def log(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, global_step=record["iteration"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
