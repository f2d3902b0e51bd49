"""Every rank's times, gathered for each log line."""

from __future__ import annotations

import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from moe_parallel.collective_errors import exchange
from moe_parallel.parallel import all_gather_single
from moe_parallel.telemetry.progress import Progress
from moe_parallel.telemetry.stragglers import Member, News, RankTimes, summary


class GatheredTimes:
    """The times of all ranks over the steps of a log line, with one collective a line."""

    def __init__(self, progress: Progress, stage: int, device: torch.device) -> None:
        """`stage`: of this rank in the pipeline. Collective."""
        self._progress = progress
        self._device = device
        self._members = exchange(Member(socket.gethostname(), stage))
        self._news = News()

    def take(self) -> tuple[dict[str, Any], str | None]:
        """`summary` of the steps since the last call, and a line about a straggler if one is due.

        Collective. The result is the same on every rank, except the line.
        """
        steps, rows = self._progress.take()
        mine = torch.tensor(
            RankTimes.of(steps, rows).numbers(), dtype=torch.float64, device=self._device
        )
        gathered = mine.new_empty(dist.get_world_size(), len(mine))
        all_gather_single(gathered.flatten(), mine)
        ranks = [RankTimes.from_numbers(numbers) for numbers in gathered.tolist()]
        found = summary(ranks, self._members)
        return found, self._news.of(found["slowest"], len(steps), time.monotonic())
