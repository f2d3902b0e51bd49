"""What is measured, and how: contenders, clocks, ceilings, memory, turns.

Bench        one operator, size and dtype: contenders and measures
Contender    one implementation: a forward pass, and the tensors to differentiate
Absent       a peer that cannot take part, and the reason
Measure      the pass that is timed, and the work that it needs at least

Contenders and ceiling take turns, so that disturbances affect all equally. The ceiling is the most
that the machine can do: a copy moves as many bytes as the work must (half read, half written);
dense products do as many FLOPs as the work, on the same shapes but with one matrix for all rows.
Results overwrite earlier ones, so allocation takes no time. Products are torch's, except in fp32 on
a CPU. There they are those of the library that our operators call, which on AMD's processors with
AVX-512 is oneDNN: it is faster than torch's MKL.

The clocks are process CPU time on a CPU, and events on a GPU. Caches are emptied before each
timing. On a shared machine, wall time says little, but the CPU time of one thread measures the
work.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moe_parallel.errors import InputError
from moe_parallel.ops import select_backend
from moe_parallel.optional import import_optional
from tools.bench.results import BenchResult, BenchRow

if TYPE_CHECKING:
    from tools.bench.sizes import BenchSize, ModelSize

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler logs its start and stop

FORWARD, BACKWARD, BOTH, STEP = "forward", "backward", "forward+backward", "step"
OURS = "ours"
FEWEST_TURNS, MOST_TURNS = 5, 25
# Relative to the largest value of a tensor. Contenders round at different places and sum in a
# different order. A wrong row or a missing prob causes an error about as large as the values.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}

MIB = 1 << 20
LARGEST_SCRATCH = 512 * MIB
LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
LONGEST_REPLAYED = 5e-3  # seconds; beyond it launches are hidden, and a graph keeps all its memory
TOO_LONG = f"it takes more than {1e3 * LONGEST_REPLAYED:g} ms"

Values = dict[str, Tensor]
Forward = Callable[[], Sequence[Tensor]]
TimedWork = Callable[..., object]
Preparation = Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class Moved:
    """Work that moves bytes: the least that is read and written. Its ceiling is a copy."""

    bytes: int

    @property
    def amount(self) -> float:
        return float(self.bytes)

    unit = "GB/s"
    ceiling = "copy"


@dataclass(frozen=True)
class Products:
    """Work that multiplies: dense products (rows, inner, columns). Its ceiling is these products,
    one after the other."""

    shapes: tuple[tuple[int, int, int], ...]

    @property
    def amount(self) -> float:
        return 2.0 * sum(m * k * n for m, k, n in self.shapes)

    unit = "GFLOP/s"
    ceiling = "dense GEMM"

    def with_gradients(self) -> Products:
        """The same with both gradients of each product, each of which costs as much as it."""
        both = [((m, n, k), (k, m, n)) for m, k, n in self.shapes]
        return Products(self.shapes + tuple(shape for pair in both for shape in pair))


@dataclass(frozen=True)
class Measure:
    timed: str  # FORWARD, BACKWARD, BOTH or STEP
    work: Moved | Products


@dataclass(frozen=True)
class BenchContender:
    """One way to do the work of a bench.

    leaves: the tensors whose gradients are computed, by name.
    weights: the names of those leaves that are parameters, not activations.
    upstream: the gradients of the first outputs; empty if nothing is differentiated.
    canonical: converts gradients (by leaf) to the layout of our own operator.
    answer: contenders with the same answer must agree; another model as a yardstick has its own.
    unordered: the outputs of choices whose order may differ, because it is that of near-ties.
    step: a step of the optimizer of a whole model.
    before_step: makes the gradients of a step; it returns no arguments for it.
    """

    name: str
    forward: Forward
    leaves: Values = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    upstream: tuple[Tensor, ...] = ()
    canonical: Callable[[Values], Values] = lambda gradients: gradients
    answer: str = ""
    unordered: frozenset[str] = frozenset()
    step: Callable[[], object] = lambda: None
    before_step: Callable[[], Sequence[Any]] = tuple

    def backward(self, outputs: Sequence[Tensor]) -> Values:
        differentiated = outputs[: len(self.upstream)]
        gradients = torch.autograd.grad(differentiated, list(self.leaves.values()), self.upstream)
        return dict(zip(self.leaves, gradients, strict=True))

    def run(self) -> tuple[Sequence[Tensor], Values]:
        """Outputs and gradients. Without `upstream` there are no gradients."""
        outputs = self.forward()
        return outputs, self.backward(outputs) if self.upstream else {}

    def values(self) -> Values:
        """The values on which contenders must agree, in one layout and detached."""
        outputs, gradients = self.run()
        named = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
        named |= {name: named[name].sort(-1).values for name in self.unordered}
        return named | {f"gradient of {n}": g for n, g in self.canonical(gradients).items()}


@dataclass(frozen=True)
class Absent:
    name: str
    reason: str


@dataclass(frozen=True)
class Bench:
    """The contenders of a bench. Peers and further variants of ours are compared with our first."""

    op: str
    size: BenchSize | ModelSize
    dtype: torch.dtype
    ours: Sequence[BenchContender]
    peers: Sequence[BenchContender | Absent]
    measures: tuple[Measure, ...]


class Unavailable(Exception):
    """Raised by a peer that cannot take part in a bench. The message is the reason."""


def peer_package(name: str, like: Tensor | None = None) -> ModuleType:
    """A module of a peer's package. Raises Unavailable, or the error of a broken installation.

    `like`: a tensor of the bench, for a package that needs a GPU.
    """
    if like is not None and not like.is_cuda:
        raise Unavailable("needs a CUDA GPU")
    try:
        return import_optional(name, "this peer")
    except InputError as error:
        raise Unavailable(str(error)) from error


def invite(name: str, build: Callable[[], BenchContender]) -> BenchContender | Absent:
    """The peer that `build` returns, or the reason for its absence.

    Another package may raise any error, on import or on construction.
    """
    try:
        return build()
    except Unavailable as error:
        return Absent(name, str(error))
    except Exception as error:
        return Absent(name, one_line(error))


def one_line(error: BaseException) -> str:
    """The first line of the error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__


@dataclass(frozen=True)
class WorkTimer:
    """Times the same work at every call.

    without_graph: the reason why it is no replay of a CUDA graph; None for a replay, and where none
        was wanted.
    """

    seconds: Callable[[], float]
    without_graph: str | None = None

    def __call__(self) -> float:
        return self.seconds()


class CpuClock:
    """Process CPU time; the work is expected to run on one thread."""

    def __init__(self) -> None:
        self.scratch = torch.ones(_cache_to_empty() // 4)

    def timer(self, work: TimedWork, prepare: Preparation = tuple) -> WorkTimer:
        """Times `work(*prepare())`. Only the work counts, and it starts with an empty cache."""

        def seconds() -> float:
            given = prepare()
            self.scratch.sum()  # read, not written: write-back of the cache would slow the work
            before = time.process_time()
            result = work(*given)
            after = time.process_time()
            del result  # freeing it is no part of the work
            return after - before

        return WorkTimer(seconds)


def _cache_to_empty() -> int:
    """Bytes to touch so that the last-level cache holds nothing else: twice its size.

    The limit is LARGEST_SCRATCH, because a process may get only a part of a shared server's cache.
    """
    try:
        size = int(LAST_LEVEL_CACHE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        size = 32 * MIB
    return min(2 * size, LARGEST_SCRATCH)


class CudaClock:
    """Time between two events on the current stream, around a replay of a CUDA graph.

    A short operator takes less time on the GPU than the host needs to launch its kernels one by
    one. A graph launches all of them at once, so its replay shows the time of the kernels.
    """

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


def work_clock_of(device: str, *, replays: bool = True) -> CpuClock | CudaClock:
    """`replays`: on a GPU, short work is captured as a CUDA graph, and its replay is timed."""
    return CpuClock() if device == "cpu" else CudaClock(replays)


def ceiling_of(work: Moved | Products, dtype: torch.dtype, device: str) -> Callable[[], object]:
    return _copy(work, device) if isinstance(work, Moved) else _products(work, dtype, device)


def _copy(work: Moved, device: str) -> Callable[[], object]:
    source = torch.zeros(max(work.bytes // 8, 1), device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _products(work: Products, dtype: torch.dtype, device: str) -> Callable[[], object]:
    # Not the device's own generator: a capture of a graph that fails leaves that one unusable.
    generator = torch.Generator(device)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, generator=generator).to(dtype)

    # Equal shapes share their matrices. The cache does not hold them anyway.
    operands = {
        (m, k, n): (matrix(m, k), matrix(k, n), matrix(m, n)) for m, k, n in set(work.shapes)
    }

    by_torch = device != "cpu" or dtype != torch.float32
    multiply_into = _by_torch if by_torch else select_backend("native").product

    def multiply() -> None:
        for shape in work.shapes:
            multiply_into(*operands[shape])

    return multiply


def _by_torch(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(left, right, out=out)


def saved_bytes(contender: BenchContender) -> int:
    """Bytes that the forward pass keeps for the backward pass. Each storage counts once.

    Parameters do not count: they exist anyway. The tokens count, because they are activations.
    """
    kept: dict[int, int] = {}
    parameters = {contender.leaves[name].untyped_storage().data_ptr() for name in contender.weights}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = contender.forward()
    del outputs  # before this, nothing was freed, so no two storages had the same address
    return sum(kept.values())


def peak_bytes(contender: BenchContender, device: str) -> int:
    """The most bytes allocated at one time beyond those before, including gradients."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()  # otherwise memory that is freed during the pass would reduce the peak
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiled:
        contender.run()
    return _peak(profiled)


def _peak(profiled: profile) -> int:
    """The highest sum of the allocations and releases so far.

    It reads the events behind the profile, because the public summary sums them per operator.
    """
    events = profiled.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak


@dataclass(frozen=True)
class Patience:
    """The time limit of a row: as many turns as fit in `seconds`, unless their number is given."""

    seconds: float
    turns: int | None = None

    def turns_of(self, one_turn: float) -> int:
        if self.turns is not None:
            return self.turns
        return min(MOST_TURNS, max(FEWEST_TURNS, int(self.seconds / max(one_turn, 1e-9))))


def measure(
    bench: Bench, clock: CpuClock | CudaClock, device: str, patience: Patience
) -> list[BenchRow]:
    """A row for each measure of the bench."""
    results = _judge(bench, device)
    return_memory(device)
    able = {result.name for result in results if result.absent is None}
    contenders = [contender for contender in [*bench.ours, *bench.peers] if contender.name in able]
    rows = []
    for one in bench.measures:
        rows.append(_row(bench, one, contenders, results, clock, device, patience))
        return_memory(device)
    return rows


def return_memory(device: str) -> None:
    """Give the memory that nothing uses back to the GPU: what a graph has had, no other may use."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _judge(bench: Bench, device: str) -> list[BenchResult]:
    """Run each contender once, compare its results, and measure its memory.

    A peer that fails is absent, with its error. A failure of our own operator is raised.
    """
    expected: dict[str, Values] = {}

    def judged(contender: BenchContender) -> BenchResult:
        values = contender.values()
        first = expected.setdefault(contender.answer, values)
        differs = None if values is first else disagreement(values, first, bench.dtype)
        del values, first
        return BenchResult(
            contender.name,
            differs=differs,
            saved_bytes=saved_bytes(contender),
            peak_bytes=peak_bytes(contender, device),
        )

    def judged_peer(peer: BenchContender | Absent) -> BenchResult:
        if isinstance(peer, Absent):
            return BenchResult(peer.name, absent=peer.reason)
        try:
            return judged(peer)
        except Exception as error:  # another package may raise anything
            return BenchResult(peer.name, absent=f"failed: {one_line(error)}")

    return [*map(judged, bench.ours), *map(judged_peer, bench.peers)]


def disagreement(values: Values, expected: Values, dtype: torch.dtype) -> str | None:
    """The value that differs most, beyond rounding, or None. Other names or shapes also differ."""
    if values.keys() != expected.keys():
        return f"has {', '.join(values)} instead of {', '.join(expected)}"
    worst, worst_name = 0.0, ""
    for name, value in values.items():
        if value.shape != expected[name].shape:
            return f"{name} is {tuple(value.shape)}, not {tuple(expected[name].shape)}"
        distance = _distance(value, expected[name])
        if not distance <= worst:  # so that NaN counts
            worst, worst_name = distance, name
    if worst <= TOLERANCE[dtype]:
        return None
    return f"{worst_name} is off by {worst:.1e} of its largest value"


def _distance(value: Tensor, expected: Tensor) -> float:
    """The largest difference in units of the largest value; integers differ or do not."""
    if value.numel() == 0:
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(value, expected) else float("inf")
    difference = (value.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max().clamp(min=1e-30))


def _row(
    bench: Bench,
    one: Measure,
    contenders: list[BenchContender],
    results: list[BenchResult],
    clock: CpuClock | CudaClock,
    device: str,
    patience: Patience,
) -> BenchRow:
    ceiling = ceiling_of(one.work, bench.dtype, device)
    timers = {
        one.work.ceiling: clock.timer(ceiling),
        **{c.name: _timer(c, one.timed, clock) for c in contenders},
    }
    samples = take_turns(timers, patience)

    def with_samples(result: BenchResult) -> BenchResult:
        reason = timers[result.name].without_graph if result.name in timers else None
        return replace(result, samples=samples.get(result.name, []), without_graph=reason)

    return BenchRow(
        op=bench.op,
        timed=one.timed,
        size=str(bench.size),
        dtype=str(bench.dtype).removeprefix("torch."),
        unit=one.work.unit,
        amount=one.work.amount,
        ceiling=with_samples(BenchResult(one.work.ceiling)),
        results=[with_samples(result) for result in results],
    )


def take_turns(
    hands: Mapping[str, Callable[[], float]], patience: Patience
) -> dict[str, list[float]]:
    """The seconds of each contender in each turn: A B C, A B C, ... An extra first turn warms
    up."""
    gc.collect()
    gc.disable()  # a collection would count for one contender at random
    try:
        start = time.monotonic()
        for work in hands.values():
            work()
        turns = patience.turns_of(time.monotonic() - start)
        samples: dict[str, list[float]] = {name: [] for name in hands}
        for _ in range(turns):
            for name, work in hands.items():
                samples[name].append(work())
    finally:
        gc.enable()
    return samples


def _timer(contender: BenchContender, timed: str, clock: CpuClock | CudaClock) -> WorkTimer:
    if timed == FORWARD:
        return clock.timer(contender.forward)
    if timed == BACKWARD:
        return clock.timer(contender.backward, lambda: (contender.forward(),))
    if timed == STEP:
        return clock.timer(contender.step, contender.before_step)
    return clock.timer(contender.run)
