"""The forward and backward passes of a step as one CUDA graph.

A kernel takes a GPU less time than the host takes to launch it, unless the micro-batches are large.
A graph is recorded once and launched as a whole, so the host no longer bounds the step. What the
host does during the passes, it does only once, while they are recorded: a graph repeats kernels,
not Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch

from moe_parallel.errors import InputError
from moe_parallel.model.forward import Batch, Reported
from moe_parallel.telemetry.progress import Phase, Progress
from moe_parallel.telemetry.statistics import RoutingTotals

#: The passes of a step on its micro-batches, and the values that each of these reports.
Passes = Callable[[Iterator[Batch]], list[Reported]]


class StepGraph:
    """Runs the passes as they are for some steps, then records them, then replays the record.

    All of it has to run on one stream that is not the default one, and so has what made the model's
    gradient buffers (`use_stream_of_graphs`).
    """

    def __init__(
        self,
        passes: Passes,
        num_micro_batches: int,
        warmup_steps: int,
        totals: RoutingTotals,
        progress: Progress,
        device: torch.device,
    ) -> None:
        """
        Args:
            passes: always of the same kernels, on the same memory, for which the host never waits.
            warmup_steps: steps before the graph is recorded, in which libraries initialize.
            totals, progress: what the host counts for each step.
        """
        self._passes = passes
        self._num_micro_batches = num_micro_batches
        self._left = warmup_steps
        self._totals, self._progress = totals, progress
        self._device = device
        self._inputs: list[dict[str, torch.Tensor]] = []  # the memory from which the graph reads
        self._graph: torch.cuda.CUDAGraph | None = None
        self._reported: list[Reported] = []  # the memory to which it writes
        self._numbers: dict[tuple[int, int], float] = {}
        self._rows = 0

    def __call__(self, batches: Iterator[Batch]) -> list[Reported]:
        """The same as `passes`. The next call overwrites the values."""
        self._read(batches)
        if self._left:
            self._left -= 1
            return self._passes(iter(self._inputs))
        if self._graph is None:
            self._graph = self._recorded()
        else:
            self._totals.add_numbers(self._numbers)
            self._progress.rows += self._rows
        with self._progress.during(Phase.REPLAY):
            self._graph.replay()
        return self._reported

    def _read(self, batches: Iterator[Batch]) -> None:
        """Copy the micro-batches of the step to where the graph reads them."""
        of_step = list(islice(batches, self._num_micro_batches))
        if not self._inputs:
            self._inputs = [
                {name: torch.empty_like(x, device=self._device) for name, x in batch.items()}
                for batch in of_step
            ]
        for batch, to in zip(of_step, self._inputs, strict=True):
            for name, x in batch.items():
                pinned = x.pin_memory() if to[name].is_cuda and not x.is_cuda else x
                to[name].copy_(pinned, non_blocking=True)

    def _recorded(self) -> torch.cuda.CUDAGraph:
        numbers, rows = self._totals.numbers(), self._progress.rows
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # Other threads may use the GPU meanwhile.
            with (
                self._progress.untimed(),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                self._reported = self._passes(iter(self._inputs))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                f"--cuda-graph-impl full_iteration: the step cannot be a CUDA graph ({reason}): "
                "leave the flag out"
            ) from error
        self._numbers = {
            place: number - numbers.get(place, 0.0)
            for place, number in self._totals.numbers().items()
        }
        self._rows = self._progress.rows - rows
        return graph


def use_stream_of_graphs(device: torch.device) -> None:
    """Let this thread use a stream that graphs can record; the default one cannot be recorded.

    Raises InputError on a CPU.
    """
    if device.type != "cuda":
        raise InputError(
            "--cuda-graph-impl full_iteration needs a GPU, and torch sees none: leave it out"
        )
    torch.cuda.set_stream(torch.cuda.Stream(device))
