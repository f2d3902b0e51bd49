"""The measurements as numbers: rows, their JSON, and values derived from the samples."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_parallel.errors import InputError
from moe_parallel.reading import parse_json, read_small

FORMAT = 1  # version of the JSON file's layout


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
class BenchPlace:
    """One operator, pass, size and dtype."""

    op: str
    timed: str
    size: str
    dtype: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.op, self.timed, self.size, self.dtype

    @property
    def title(self) -> str:
        return f"{self.op} {self.timed}, {self.size}, {self.dtype}"


@dataclass(frozen=True)
class BenchRow(BenchPlace):
    """The measurements at one place. Ours is the first result."""

    unit: str
    amount: float  # bytes or FLOPs that the work needs at least
    ceiling: BenchResult
    results: list[BenchResult]

    @property
    def ours(self) -> BenchResult:
        return self.results[0]

    def result(self, name: str) -> BenchResult | None:
        return next((result for result in self.results if result.name == name), None)

    def rate(self, result: BenchResult) -> float:
        """The rate in `unit`: GB/s or GFLOP/s."""
        return self.amount / result.median / 1e9

    def share(self, result: BenchResult) -> float:
        """The share of the ceiling's rate; 1 is as fast as the machine copies or multiplies."""
        return times_as_fast(result, self.ceiling)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> BenchRow:
        results = [BenchResult(**result) for result in fields["results"]]
        return cls(**fields | {"ceiling": BenchResult(**fields["ceiling"]), "results": results})


def times_as_fast(one: BenchResult, other: BenchResult) -> float:
    """How many times as fast `one` is as `other`: the median of the ratios of their turns.

    Both were measured next to each other in a turn, so a slow minute of the machine cancels.
    """
    return statistics.median(b / a for a, b in zip(one.samples, other.samples, strict=True))


def write_json(path: Path, about: dict[str, Any], rows: Iterable[BenchRow]) -> None:
    content = {"format": FORMAT, **about, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> tuple[dict[str, Any], list[BenchRow]]:
    """Read a file of `write_json`. Raises InputError for any other file."""
    try:
        content = parse_json(read_small(path))
        if content["format"] != FORMAT:
            raise InputError(f"{path} has format {content['format']}; this tool reads {FORMAT}")
        rows = [BenchRow.from_json(row) for row in content.pop("rows")]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not a file of `run.py --json`") from None
    return content, rows
