"""Dispatch in parts equals dispatch at once, and waits for no more than it must."""

from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe_parallel.dispatch import AllToAllDispatcher, AllToAllInParts, in_parts
from moe_parallel.dispatch.in_parts import SideStream
from moe_parallel.ops import select_backend
from tests.dispatch.streams import Streams
from tests.dispatch.test_dispatch import (
    BACKENDS,
    EXPERTS,
    HIDDEN,
    NAMES,
    Problem,
    choices_of,
    compute,
    problem,
)
from tests.distributed import run_distributed

Arrays = list[numpy.ndarray]

#: Ranks, shards of an expert, parts of the experts of a rank.
LAYOUTS = {
    "two experts": (2, 1, 2),
    "four experts, of two shards": (2, 2, 4),
    "four experts, two parts": (2, 2, 2),
}


def _place(shards: int) -> tuple[int, slice]:
    """The first expert of this rank, and its shard of the inner width."""
    rank, size = dist.get_rank(), HIDDEN // shards
    first = rank // shards * (EXPERTS * shards // dist.get_world_size())
    return first, slice(rank % shards * size, (rank % shards + 1) * size)


def _outputs(rows: Any, first: int, of_part: int, shard: slice) -> Any:
    for part, arrived in enumerate(rows):
        yield compute(arrived, first + part * of_part, shard)


def _solve(task: Problem, backend: str, shards: int, parts: int) -> Arrays:
    """The outputs and the gradients of x and probs on this rank."""
    rank = dist.get_rank()
    x, probs = task.x[rank].requires_grad_(), task.probs[rank].requires_grad_()
    choices = choices_of(task.experts[rank], probs)
    first, shard = _place(shards)
    build = (EXPERTS, dist.group.WORLD, shards, select_backend(backend))
    if parts == 1:
        whole = AllToAllDispatcher(*build)
        rows = whole.dispatch(x, choices, task.pad_rows_per_expert)
        y = whole.combine(compute(rows, first, shard), rows.route)
    else:
        divided = AllToAllInParts(*build, parts=parts)
        departed = divided.dispatch_parts(x, choices, task.pad_rows_per_expert)
        of_part = EXPERTS * shards // dist.get_world_size() // parts
        y = divided.combine_parts(_outputs(departed.parts, first, of_part, shard), departed)
    (y * task.direction[rank]).sum().backward()
    grads = [x.grad, probs.grad]
    for tensor in (x, probs):
        tensor.grad = None
    return [y.detach().numpy(), *(g.numpy() for g in grads)]


def _solve_all(shards: int, parts: int, tasks: list[Problem]) -> list[tuple[Arrays, Arrays]]:
    return [
        tuple(_solve(task, backend, shards, c) for c in (1, parts))
        for backend in BACKENDS
        for task in tasks
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_equal_the_whole(layout):
    ranks, shards, parts = LAYOUTS[layout]
    tasks = [problem(name, ranks) for name in NAMES]
    for found in run_distributed(ranks, _solve_all, shards, parts, tasks):
        for number, (whole, divided) in enumerate(found):
            name = NAMES[number % len(NAMES)]
            for wanted, seen in zip(whole, divided, strict=True):
                numpy.testing.assert_allclose(seen, wanted, rtol=1e-12, atol=1e-12, err_msg=name)


def _waits() -> tuple[list[int], list[int]]:
    """How far a part has waited for the side stream, and when each exchange is over there."""
    task, rank = problem("some dropped", dist.get_world_size()), dist.get_rank()
    x, probs, experts = task.x[rank], task.probs[rank], task.experts[rank]
    waited = []
    with (
        Streams() as streams,
        mock.patch.object(in_parts, "work_place_of", lambda device: SideStream(streams.side)),
    ):
        dispatcher = AllToAllInParts(
            EXPERTS, dist.group.WORLD, 1, select_backend("reference"), parts=2
        )
        departed = dispatcher.dispatch_parts(x, choices_of(experts, probs), None)

        def outputs() -> Any:
            for rows in departed.parts:
                waited.append(streams.main.seen["side"])
                yield rows.x_MD * rows.probs_MJ

        dispatcher.combine_parts(outputs(), departed) + 1
    return waited, streams.exchanged


def test_a_part_waits_for_its_own_rows_and_the_streams_share_memory_safely():
    """The sizes are exchanged first, then all rows; `Streams` checks each use of memory."""
    for waited, (sizes, *exchanged) in run_distributed(2, _waits):
        assert sizes == 0  # on the current stream
        assert len(exchanged) == 4  # the rows of two parts, and their outputs
        assert len(set(waited)) == 2
        for seen, over, after in zip(waited, exchanged[:2], exchanged[1:3], strict=True):
            assert over <= seen < after


class Order(TorchDispatchMode):
    """Logs exchanges and, by `sin` and its gradient `cos`, what the experts compute."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::alltoall"):
            self.log.append("exchange")
        elif name in ("aten::sin", "aten::cos"):
            self.log.append("experts" if name == "aten::sin" else "their gradient")
        return func(*args, **(kwargs or {}))


def _order() -> tuple[list[str], list[str]]:
    task, rank = problem("some dropped", dist.get_world_size()), dist.get_rank()
    x, probs = task.x[rank].requires_grad_(), task.probs[rank].requires_grad_()
    dispatcher = AllToAllInParts(EXPERTS, dist.group.WORLD, 1, select_backend("reference"), parts=2)
    with Order() as forward:
        departed = dispatcher.dispatch_parts(x, choices_of(task.experts[rank], probs), None)
        outputs = (rows.x_MD.sin() * rows.probs_MJ for rows in departed.parts)
        y = dispatcher.combine_parts(outputs, departed)
    with Order() as backward:
        y.sum().backward()
    return forward.log, backward.log


def test_both_passes_start_exchanges_before_what_can_hide_them():
    """Nothing that the side stream does first waits for what the current stream does later."""
    for forward, backward in run_distributed(2, _order):
        send = ["exchange"]
        assert forward == 3 * send + 2 * ["experts", *send]  # the sizes; the rows of each part
        assert backward == 2 * [*send, "their gradient"] + 2 * send


def test_the_stand_in_sees_a_missing_wait_and_a_missing_record():
    with Streams() as streams:
        made = torch.ones(2) + 1
        with torch.cuda.stream(streams.side):
            with pytest.raises(AssertionError, match="does not wait"):
                made + 1
            streams.side.wait_stream(streams.main)
            with pytest.raises(AssertionError, match="has not recorded"):
                made + 1
            made.record_stream(streams.side)
            assert (made + 1).shape == (2,)
