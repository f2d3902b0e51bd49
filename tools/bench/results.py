"""The measurements: rows, their JSON, values derived from the samples, and rows as text."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DIFFERS = "DIFFERS"


@dataclass(frozen=True)
class BenchResult:
    """One contender of a row. An absent one has only the reason."""

    name: str
    samples: list[float] = field(default_factory=list)  # seconds, one per turn
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    differs: str | None = None
    absent: str | None = None
    without_graph: str | None = None  # on a GPU: the reason why no CUDA graph was replayed

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.samples) < 2:
            return self.median, self.median
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third


@dataclass(frozen=True)
class BenchRow:
    """The measurements of one operator, pass, size and dtype. Ours is the first result."""

    op: str
    timed: str
    size: str
    dtype: str
    unit: str
    amount: float  # bytes or FLOPs that the work needs at least
    ceiling: BenchResult
    results: list[BenchResult]

    @property
    def title(self) -> str:
        return f"{self.op} {self.timed}, {self.size}, {self.dtype}"

    @property
    def ours(self) -> BenchResult:
        return self.results[0]

    def rate(self, result: BenchResult) -> float:
        """The rate in `unit`: GB/s or GFLOP/s."""
        return self.amount / result.median / 1e9

    def share(self, result: BenchResult) -> float:
        """The share of the ceiling's rate; 1 is as fast as the machine copies or multiplies."""
        return times_as_fast(result, self.ceiling)


def times_as_fast(one: BenchResult, other: BenchResult) -> float:
    """How many times as fast `one` is as `other`: the median of the ratios of their turns.

    Both were measured next to each other in a turn, so a slow minute of the machine cancels.
    """
    return statistics.median(b / a for a, b in zip(one.samples, other.samples, strict=True))


def write_json(path: Path, about: dict[str, Any], rows: Iterable[BenchRow]) -> None:
    content = {**about, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def format_row(
    row: BenchRow, tokens: int | None = None, weights: Mapping[str, int] | None = None
) -> str:
    """A title, and a line for each contender that was measured.

    `tokens`, `weights`: of a whole model's pass, and its parameters by contender; then the line has
    these, and tokens instead of bytes or FLOPs.
    """
    scale, unit = (1e6, "us") if tokens is None else (1e3, "ms")
    line = "  {:<32}{:>12}  {:<21}{:>9}{:>9}{:>11}{:>10}{:>10}{:>9}"
    heads = ("of max", "our speed", "peak MiB", "saved MiB", "params" if weights else "")
    rate = row.unit if tokens is None else "tokens/s"
    lines = [
        f"{row.title}   ({row.ceiling.name} {row.rate(row.ceiling):,.1f} {row.unit})",
        line.format("", unit, "quartiles", rate, *heads).rstrip(),
    ]
    for result in row.results:
        if result.absent is not None:
            continue
        first, third = (f"{value * scale:,.0f}" for value in result.quartiles)
        speed = "" if result is row.ours else f"{times_as_fast(row.ours, result):.2f}x"
        text = line.format(
            result.name,
            f"{result.median * scale:,.1f}",
            f"[{first} .. {third}]",
            f"{row.rate(result):,.1f}" if tokens is None else f"{tokens / result.median:,.0f}",
            f"{100 * row.share(result):.1f}%",
            speed if result.differs is None else DIFFERS,
            *("" if amount is None else f"{amount / 2**20:,.2f}"
              for amount in (result.peak_bytes, result.saved_bytes)),
            f"{weights[result.name] / 1e6:.2f}M" if weights else "",
        ).rstrip()  # fmt: skip
        lines += [text] if result.differs is None else [text, f"    {result.differs}"]
    return "\n".join(lines)


def format_reasons(rows: Iterable[BenchRow]) -> str:
    """Who was absent, and what was timed without a CUDA graph: a line for each reason."""
    absent: dict[str, dict[str, None]] = {}
    launched: dict[str, dict[str, None]] = {}
    for row in rows:
        for result in (row.ceiling, *row.results):
            if result.absent is not None:
                absent.setdefault(result.absent, {})[result.name] = None
            if result.without_graph is not None:
                launched.setdefault(result.without_graph, {})[f"{row.op} {result.name}"] = None
    lines = ["absent:"] * bool(absent)
    lines += [f"  {', '.join(who)}: {reason}" for reason, who in absent.items()]
    lines += ["timed without a CUDA graph:"] * bool(launched)
    return "\n".join(lines + [f"  {why}: {', '.join(who)}" for why, who in launched.items()])
