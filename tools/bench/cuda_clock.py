"""The clock on a GPU: events around a replay of the work as a CUDA graph.

A short operator takes less time on the GPU than the host needs to launch its kernels one by one. A
graph launches all of them at once, so its replay shows the time of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tools.bench.clock import MIB, WorkTimer
from tools.bench.contender import one_line

LONGEST_REPLAYED = 5e-3  # seconds; beyond it launches are hidden, and a graph keeps all its memory
TOO_LONG = f"it takes more than {1e3 * LONGEST_REPLAYED:g} ms"

TimedWork = Callable[..., object]
Preparation = Callable[[], Sequence[Any]]


class CudaClock:
    """Time between two events on the current stream."""

    def __init__(self, replays: bool = True) -> None:
        self.replays = replays
        self.scratch = torch.zeros(256 * MIB // 4, device="cuda")

    def timer(self, work: TimedWork, prepare: Preparation = tuple) -> WorkTimer:
        """Replays a graph if the work can be captured as one. Otherwise it launches the work."""
        if not self.replays:
            return WorkTimer(lambda: self._seconds(work, prepare))
        try:
            if self._warm_up(work, prepare) > LONGEST_REPLAYED:
                return WorkTimer(lambda: self._seconds(work, prepare), TOO_LONG)
            replay_work, replay_prepare = _captured(work, prepare)
        except Exception as error:  # another package may raise anything
            reason = one_line(error)
            return WorkTimer(lambda: self._seconds(work, prepare), reason)
        finally:
            torch.cuda.empty_cache()  # no other stream can use the memory of the warm-up's
        return WorkTimer(lambda: self._seconds(replay_work, replay_prepare))

    def _warm_up(self, work: TimedWork, prepare: Preparation) -> float:
        """The seconds of the work on a stream of its own, as a capture needs it. Raises
        RuntimeError if the host waits for the GPU."""
        stream, before = torch.cuda.Stream(), torch.cuda.get_sync_debug_mode()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(*prepare())  # the first time libraries may wait: they initialize and choose
            torch.cuda.set_sync_debug_mode("error")
            try:
                work(*prepare())
            finally:
                torch.cuda.set_sync_debug_mode(before)
            seconds = self._seconds(work, prepare)
        torch.cuda.current_stream().wait_stream(stream)
        return seconds

    def _seconds(self, work: TimedWork, prepare: Preparation) -> float:
        given = prepare()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.scratch.zero_()
        start.record()
        result = work(*given)
        end.record()
        end.synchronize()
        del result  # until here, so that its memory is not used again within the work
        return float(start.elapsed_time(end)) / 1e3


def _captured(work: TimedWork, prepare: Preparation) -> tuple[TimedWork, Preparation]:
    """Functions that replay the work and its preparation. Graphs of one memory pool may use each
    other's results if they are replayed in the order of their captures."""
    if prepare is tuple:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay, tuple
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        given = prepare()
    with torch.cuda.graph(second, pool=first.pool()):
        work(*given)

    def replay_prepare() -> Sequence[Any]:
        first.replay()
        return ()

    return second.replay, replay_prepare
