"""The forward and backward passes of a step as one CUDA graph.

A kernel takes a GPU less time than the host takes to launch it, unless the micro-batches are large.
A graph is recorded once and launched as a whole, so the host no longer bounds the step. What the
host does during the passes, it does only once, while they are recorded: a graph repeats kernels,
not Python.

Where the number of rows of the experts varies, the record has a fixed one for each layer: MARGIN
times the most that a micro-batch has needed lately. With expert parallelism, messages have a fixed
number of rows, too. The device counts what each micro-batch needs. If one needs more on any rank of
the experts, then before anything uses the result of the step, the state is put back, the step is
launched without a graph, and the next step is recorded anew. So nothing is dropped. If steps need
less than half, the next one is recorded anew, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
import torch.distributed as dist

from moe_parallel.copies import copied_to
from moe_parallel.dispatch import RowBudget
from moe_parallel.errors import InputError
from moe_parallel.layers.dispatched import DispatchedLayer
from moe_parallel.model.forward import Batch, Reported
from moe_parallel.telemetry.progress import Phase, Progress
from moe_parallel.telemetry.statistics import RoutingTotals

#: Runs all micro-batches of a step; returns what each reports.
Passes = Callable[[Iterator[Batch]], list[Reported]]

#: Rows of the record, by those of the largest micro-batch; of this number, a step keeps KEPT.
MARGIN, KEPT = 1.25, 0.9


class StepGraph:
    """Launches the passes for some steps, then records them, then replays the record.

    The gradient buffers must be made, and all calls run, on one stream that is not the default one
    (`use_stream_of_graphs`).
    """

    def __init__(
        self,
        passes: Passes,
        restart: Callable[[], object],
        finish: Callable[[], object],
        modules: Sequence[torch.nn.Module],
        num_micro_batches: int,
        warmup_steps: int,
        ranks: dist.ProcessGroup,
        totals: RoutingTotals,
        progress: Progress,
        device: torch.device,
    ) -> None:
        """
        Args:
            passes: launches the same kernels on the same memory in each call, and never waits for
                the device but for numbers of rows. It draws no random numbers.
            restart: puts the gradients back to what they were before the passes.
            finish: called after the passes of each step, and not recorded.
            modules: passes change their buffers, besides gradients.
            warmup_steps: steps before the graph is recorded, in which libraries initialize.
            ranks: those that exchange rows in the passes, so that they record and launch together.
            totals, progress: what the host counts for each step.
        """
        self._passes, self._restart, self._finish = passes, restart, finish
        self._modules = modules
        self._num_micro_batches = num_micro_batches
        self._warmup_left = warmup_steps
        self._ranks = ranks
        self._totals, self._progress = totals, progress
        self._device = device
        self._inputs: list[dict[str, torch.Tensor]] = []  # the memory from which the graph reads
        self._graph: torch.cuda.CUDAGraph | None = None
        self._reported: list[Reported] = []  # the memory to which it writes
        self._host_numbers: dict[tuple[int, int], float] = {}  # of one step
        self._host_rows = 0
        layers = [
            layer
            for module in modules
            for layer in module.modules()
            if isinstance(layer, DispatchedLayer)
        ]
        self._counted_L3 = torch.zeros(len(layers), 3, dtype=torch.int64, device=device)
        self._budgets = [RowBudget(counted_3) for counted_3 in self._counted_L3]
        for layer, budget in zip(layers, self._budgets, strict=True):
            layer.row_budget = budget
        # Of each layer, the rows of its experts and those of a message.
        self._most = [0.0] * 2 * len(layers)  # that a micro-batch needs
        self._room: list[int] = []  # of the record; []: no limit
        self._state: list[tuple[torch.Tensor, torch.Tensor]] = []  # each with its copy

    def __call__(self, batches: Iterator[Batch]) -> list[Reported]:
        """The same as `passes` and `finish`. The next call overwrites the values."""
        self._read(batches)
        if self._warmup_left:
            self._warmup_left -= 1
            self._launch()
        elif not self._replay():
            self._graph, self._reported, self._room = None, [], []  # their memory is needed
            self._restart()
            self._launch()
        self._finish()
        return self._reported

    def _launch(self) -> None:
        self._reported = self._passes(iter(self._inputs))
        self._end_counting()

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
                to[name].copy_(copied_to(self._device, x))

    def _replay(self) -> bool:
        """Returns whether the rows had room. If not, all is as before but for the gradients."""
        if self._graph is None:
            self._graph = self._recorded()
        with self._progress.during(Phase.REPLAY):
            self._graph.replay()
        had_room = self._end_counting()
        if had_room:
            self._totals.add_numbers(self._host_numbers)
            self._progress.rows += self._host_rows
        else:
            for x, before in self._state:
                x.copy_(before)
        return had_room

    def _end_counting(self) -> bool:
        """Reads the rows that the step needed. Returns whether they had room on all ranks."""
        if not any(budget.counts_rows for budget in self._budgets):
            return True
        total_1 = self._counted_L3[:, 0].sum(0, keepdim=True)
        most_2L = self._counted_L3[:, 1:].flatten()
        if self._ranks.size() > 1:
            dist.all_reduce(most_2L, dist.ReduceOp.MAX, group=self._ranks)
        rows, *most = torch.cat([total_1, most_2L]).tolist()
        self._counted_L3.zero_()
        had_room = all(x <= room for x, room in zip(most, self._room, strict=False))
        if had_room:  # otherwise later layers had wrong tokens
            self._most = [max(x, KEPT * y) for x, y in zip(most, self._most, strict=True)]
            self._progress.rows += rows
            if sum(self._room) > 2 * MARGIN * sum(self._most):  # less room is faster
                self._graph, self._room = None, []
        return had_room

    def _recorded(self) -> torch.cuda.CUDAGraph:
        self._room = [max(1, math.ceil(MARGIN * most)) for most in self._most]
        rooms = zip(self._budgets, self._room[::2], self._room[1::2], strict=True)
        for budget, rows, message in rooms:
            budget.rows, budget.message = rows, message
        state = [*self._totals.on_device()]
        state += [x for module in self._modules for _, x in module.named_buffers()]
        varies = any(budget.counts_rows for budget in self._budgets)
        self._state = [(x, x.clone()) for x in state if varies]
        numbers, rows_before = self._totals.numbers(), self._progress.rows
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # Other threads may use the GPU meanwhile.
            with (
                self._progress.untimed(),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                for x, before in self._state:
                    before.copy_(x)
                self._reported = self._passes(iter(self._inputs))
        except RuntimeError as error:
            raise _explained(error) from error
        self._host_numbers = {
            place: number - numbers.get(place, 0.0)
            for place, number in self._totals.numbers().items()
        }
        self._totals.add_numbers({place: -n for place, n in self._host_numbers.items()})
        self._host_rows = self._progress.rows - rows_before
        self._progress.rows = rows_before
        for budget in self._budgets:
            budget.rows = budget.message = None
        return graph


def _explained(error: BaseException) -> BaseException:
    """The error for the user, if recording failed with `error`.

    The end of a recording that has failed raises an error of its own, which says little.
    """
    first = error
    while first.__context__ is not None:
        first = first.__context__
    if isinstance(first, torch.OutOfMemoryError | dist.DistError):
        return first
    reason = (str(first).strip() or repr(first)).splitlines()[0]
    return InputError(
        f"--cuda-graph-impl full_iteration: the step cannot be recorded ({reason}): leave it out"
    )


def use_stream_of_graphs(device: torch.device) -> None:
    """Let this thread use a stream other than the default one, which graphs cannot record.

    Raises InputError on a CPU.
    """
    if device.type != "cuda":
        raise InputError(
            "--cuda-graph-impl full_iteration needs a GPU, and torch sees none: leave it out"
        )
    if torch.cuda.current_stream() == torch.cuda.default_stream():
        torch.cuda.set_stream(torch.cuda.Stream(device))
