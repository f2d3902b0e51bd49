"""AoE and its MoE twin of as many parameters: the contenders, and the comparison of their runs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from moe_parallel.telemetry.metrics import MetricsLine

LEFT_OUT = 2  # iterations at the beginning of a run
BY_BIAS = {"moe-aux-loss-coeff": "0", "moe-router-enable-expert-bias": "true"}


@dataclass(frozen=True)
class TwinContender:
    """A configuration of the paper with its own flags. The others are compared with the twin;
    `least_speed` and `most_memory` are the goals, as multiples of the twin's values."""

    name: str
    file: str
    flags: dict[str, str] = field(default_factory=dict)
    twin: str | None = None
    least_speed: float = 0.0
    most_memory: float = 0.0

    def verdict(self, speed: float, memory: float) -> str:
        met = speed >= self.least_speed and memory <= self.most_memory
        goal = f"goal >= {self.least_speed:.2f}x, <= {self.most_memory:.2f}x"
        return f"{'met' if met else 'missed'} ({goal})"


def contenders(rank: int, width: int | None = None) -> list[TwinContender]:
    """The contenders. `rank`: d_low of AoE; `width`: d_wide; None: as it follows by Eq. 5."""
    low_rank = {"aoe-low-rank-size": str(rank)}
    if width is not None:
        low_rank["aoe-wide-size"] = str(width)
    moe, moe_by_bias = "MoE, aux loss", "MoE, by bias"
    return [
        TwinContender(moe, "moe_732m.yaml"),
        TwinContender("AoE, aux loss, full gradient", "aoe_732m.yaml", low_rank, moe, 0.98, 1.0),
        TwinContender(moe_by_bias, "moe_732m.yaml", BY_BIAS),
        TwinContender(
            "AoE, by bias, selected gradient", "aoe_732m.yaml",
            low_rank | BY_BIAS | {"aoe-gradient": "selected"}, moe_by_bias, 0.99, 1.0,
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class TwinRun:
    """The measurements of a run: tokens per second of each counted iteration, and peak memory."""

    tokens_per_second: list[float]
    peak_memory_bytes: int

    @classmethod
    def of(cls, records: list[MetricsLine]) -> TwinRun:
        counted = records[LEFT_OUT:]
        return cls(
            [record["tokens_per_second"] for record in counted],
            max(record["peak_memory_bytes"] for record in counted),
        )


def table(field_of: list[TwinContender], runs: dict[str, list[TwinRun]], judged: bool) -> list[str]:
    """The table. Each ratio is the median over turns of the ratio of two runs in a turn."""
    head = f"  {'':<34}{'tokens/s':>10}  {'speed':>8}  {'peak MiB':>10}  {'memory':>8}"
    lines = ["", head]
    for contender in field_of:
        ours = runs[contender.name]
        speed = statistics.median(v for run in ours for v in run.tokens_per_second)
        peak = max(run.peak_memory_bytes for run in ours)
        line = f"  {contender.name:<34}{speed:>10,.0f}"
        if contender.twin is None:
            lines.append(f"{line}  {'':>8}  {peak / 2**20:>10,.1f}")
            continue
        faster, larger = ratios(ours, runs[contender.twin])
        line += f"  {faster:>7.3f}x  {peak / 2**20:>10,.1f}  {larger:>7.3f}x"
        lines.append(f"{line}  {contender.verdict(faster, larger)}" if judged else line)
    return lines


def ratios(ours: list[TwinRun], twins: list[TwinRun]) -> tuple[float, float]:
    """The speed and the memory of our runs, as multiples of the twin's."""
    speeds = [
        statistics.median(run.tokens_per_second) / statistics.median(twin.tokens_per_second)
        for run, twin in zip(ours, twins, strict=True)
    ]
    memories = [
        run.peak_memory_bytes / twin.peak_memory_bytes
        for run, twin in zip(ours, twins, strict=True)
    ]
    return statistics.median(speeds), statistics.median(memories)
