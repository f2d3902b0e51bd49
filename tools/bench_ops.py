"""Time every operator, reference against native, on one thread of this machine's CPU.

    python tools/bench_ops.py [--tokens 2048] [--dtype float32] [--repeats 5]

Forward and backward together, in process CPU time: on a shared machine wall time says little.
The contenders take turns and the median of the turns counts. Rates are set against ceilings
measured in the same run: a copy (for what moves bytes) and a dense product (for what multiplies).
Where the outputs or gradients of two contenders disagree no speed-up is printed.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_parallel.ops import Ops, RowMap, extension, select_backend

Outputs = tuple[Tensor, ...]
CACHE_BYTES = 64 << 20  # more than the caches of one core: what a contender leaves is evicted
DISAGREEMENT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest value


@dataclass(frozen=True)
class Shape:
    tokens: int
    width: int
    experts: int
    choices: int
    expert_width: int
    rank: int


@dataclass(frozen=True)
class Bench:
    """One operator: the same work in several hands, and how much work that is."""

    name: str
    contenders: dict[str, Callable[[], Outputs]]
    amount: float  # bytes that must move at least, or floating-point operations
    unit: str  # GB/s or GFLOP/s


def leaf(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def with_gradients(output: Tensor, upstream: Tensor, *inputs: Tensor) -> Outputs:
    return (output.detach(), *torch.autograd.grad(output, inputs, upstream))


def routing(shape: Shape) -> Tensor:
    """Distinct experts for each token, without a pattern."""
    scores = torch.rand(shape.tokens, shape.experts, generator=torch.Generator().manual_seed(0))
    return scores.topk(shape.choices).indices


def bench_routing_map(shape: Shape, backends: list[Ops]) -> Bench:
    experts_TK = routing(shape)
    contenders = {
        ops.name: lambda ops=ops: tuple(ops.routing_map(experts_TK, shape.experts))
        for ops in backends
    }
    return Bench("routing_map", contenders, 3 * 8 * experts_TK.numel(), "GB/s")


def bench_permute(shape: Shape, dtype: torch.dtype, row_map: RowMap, backends: list[Ops]) -> Bench:
    x_TD = leaf(shape.tokens, shape.width, dtype=dtype, seed=1)
    dy_ND = leaf(row_map.slots_N.numel(), shape.width, dtype=dtype, seed=2).detach()
    contenders = {
        ops.name: lambda ops=ops: with_gradients(ops.permute(x_TD, row_map), dy_ND, x_TD)
        for ops in backends
    }
    moved = x_TD.nbytes * (1 + shape.choices) + row_map.slots_N.nbytes
    return Bench("permute", contenders, 2 * moved, "GB/s")


def bench_unpermute(
    shape: Shape, dtype: torch.dtype, row_map: RowMap, backends: list[Ops]
) -> Bench:
    y_ND = leaf(row_map.slots_N.numel(), shape.width, dtype=dtype, seed=1)
    gates_TK = leaf(shape.tokens, shape.choices, dtype=torch.float32, seed=2)
    dout_TD = leaf(shape.tokens, shape.width, dtype=dtype, seed=3).detach()

    def run(ops: Ops) -> Outputs:
        return with_gradients(ops.unpermute(y_ND, row_map, gates_TK), dout_TD, y_ND, gates_TK)

    contenders = {ops.name: lambda ops=ops: run(ops) for ops in backends}
    forward = y_ND.nbytes + dout_TD.nbytes + row_map.rows_TK.nbytes
    backward = 2 * y_ND.nbytes + dout_TD.nbytes + row_map.rows_TK.nbytes
    return Bench("unpermute", contenders, forward + backward, "GB/s")


def bench_grouped_gemm(
    shape: Shape, dtype: torch.dtype, row_map: RowMap, backends: list[Ops]
) -> Bench:
    rows = row_map.slots_N.numel()
    x_NI = leaf(rows, shape.width, dtype=dtype, seed=1)
    w_EIO = leaf(shape.experts, shape.width, shape.expert_width, dtype=dtype, seed=2)
    dy_NO = leaf(rows, shape.expert_width, dtype=dtype, seed=3).detach()
    contenders = {
        ops.name: lambda ops=ops: with_gradients(
            ops.grouped_gemm(x_NI, w_EIO, row_map.counts_E), dy_NO, x_NI, w_EIO
        )
        for ops in backends
    }
    if hasattr(functional, "grouped_mm"):
        ends_E = row_map.counts_E.cumsum(0).int()
        contenders["torch grouped_mm"] = lambda: with_gradients(
            functional.grouped_mm(x_NI, w_EIO, offs=ends_E), dy_NO, x_NI, w_EIO
        )
    flops = 3 * 2.0 * rows * shape.width * shape.expert_width
    return Bench("grouped_gemm", contenders, flops, "GFLOP/s")


def bench_norm_topk(shape: Shape, dtype: torch.dtype, backends: list[Ops]) -> Bench:
    x_TD = leaf(shape.tokens, shape.width, dtype=dtype, seed=1)
    w_EDR = leaf(shape.experts, shape.width, shape.rank, dtype=dtype, seed=2)
    dnorms_TE = leaf(shape.tokens, shape.experts, dtype=torch.float32, seed=3).detach()

    def run(ops: Ops) -> Outputs:
        # The choices are left out of the comparison: near-ties may fall either way.
        return with_gradients(ops.norm_topk(x_TD, w_EDR, shape.choices)[0], dnorms_TE, x_TD, w_EDR)

    contenders = {ops.name: lambda ops=ops: run(ops) for ops in backends}
    # Counted without recomputing the products, so that the memory it saves is paid for here.
    flops = 3 * 2.0 * shape.tokens * shape.width * shape.experts * shape.rank
    return Bench("norm_topk", contenders, flops, "GFLOP/s")


def cpu_seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def flush_cache(scratch: Tensor) -> None:
    scratch.add_(1)


def median_times(contenders: dict[str, Callable[[], Outputs]], repeats: int) -> dict[str, float]:
    """Seconds of each; they take turns, so that what disturbs the machine disturbs all."""
    scratch = torch.zeros(CACHE_BYTES // 4)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, work in contenders.items():
            flush_cache(scratch)
            times[name].append(cpu_seconds(work))
    return {name: statistics.median(values) for name, values in times.items()}


def copy_ceiling(repeats: int) -> float:
    """GB/s of a copy, counting what is read and what is written."""
    source = torch.zeros(CACHE_BYTES // 4)
    target = torch.empty_like(source)
    seconds = median_times({"copy": lambda: (target.copy_(source),)}, repeats)["copy"]
    return 2 * source.nbytes / seconds / 1e9


def product_ceiling(shape: Shape, dtype: torch.dtype, repeats: int) -> float:
    """GFLOP/s of one dense product of all rows."""
    rows = shape.tokens * shape.choices
    x = leaf(rows, shape.width, dtype=dtype, seed=1).detach()
    w = leaf(shape.width, shape.expert_width, dtype=dtype, seed=2).detach()
    seconds = median_times({"mm": lambda: (x @ w,)}, repeats)["mm"]
    return 2 * rows * shape.width * shape.expert_width / seconds / 1e9


def disagreement(results: Outputs, expected: Outputs) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        for a, b in zip(results, expected, strict=True)
    )


def report(bench: Bench, ceiling: float, tolerance: float, repeats: int) -> None:
    outputs = {name: work() for name, work in bench.contenders.items()}  # warms up as well
    base = next(iter(bench.contenders))
    seconds = median_times(bench.contenders, repeats)
    for name, spent in seconds.items():
        rate = bench.amount / spent / 1e9
        off = disagreement(outputs[name], outputs[base])
        if off > tolerance:
            verdict = f"no speed-up: differs from {base} by {off:.1e}"
        else:
            verdict = f"{seconds[base] / spent:.2f} x {base}"
        print(
            f"{bench.name:13} {name:17} {spent * 1e3:9.2f} ms {rate:8.2f} {bench.unit:8}"
            f"{100 * rate / ceiling:5.0f} %   {verdict}"
        )


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def print_host() -> None:
    built = f"built for torch {extension.load().build_info()['torch']}"
    print(f"host    {processor()}, {os.cpu_count()} cores, {platform.system()}")
    print(f"load    {', '.join(f'{load:.2f}' for load in os.getloadavg())} (1, 5, 15 minutes)")
    print(f"python  {platform.python_version()}, torch {torch.__version__}, extension {built}")
    print(f"CPU     {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread")


def run(shape: Shape, dtype: torch.dtype, repeats: int) -> None:
    backends = [select_backend("reference"), select_backend("native")]
    row_map = backends[0].routing_map(routing(shape), shape.experts)
    ceilings = {
        "GB/s": copy_ceiling(repeats),
        "GFLOP/s": product_ceiling(shape, dtype, repeats),
    }
    print(f"\n{dtype}, {shape}")
    print(f"ceilings: copy {ceilings['GB/s']:.2f} GB/s, product {ceilings['GFLOP/s']:.1f} GFLOP/s")
    for bench in (
        bench_routing_map(shape, backends),
        bench_permute(shape, dtype, row_map, backends),
        bench_unpermute(shape, dtype, row_map, backends),
        bench_grouped_gemm(shape, dtype, row_map, backends),
        bench_norm_topk(shape, dtype, backends),
    ):
        report(bench, ceilings[bench.unit], DISAGREEMENT[dtype], repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--choices", type=int, default=2)
    parser.add_argument("--expert-width", type=int, default=1536)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = vars(parser.parse_args())
    dtypes = arguments.pop("dtype") or ["float32", "bfloat16"]
    repeats = arguments.pop("repeats")

    torch.set_num_threads(1)
    print_host()
    for dtype in dtypes:
        run(Shape(**arguments), getattr(torch, dtype), repeats)


if __name__ == "__main__":
    main()
