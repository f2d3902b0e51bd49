"""The workloads of routing.py, and their measurements as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SYSTEMS = ("topk", "top_p", "aoe", "aoe_top_p")
_LINE = "{:<32}{:>10}{:>12}{:>12}{:>10}{:>12}{:>10}"
_HEADS = ("workload", "max/mean", "CPU ms", "x balanced", "peak MiB", "x balanced", "saved MiB")


@dataclass(frozen=True)
class ForcedWorkload:
    """A forced routing, with or without a limit on the experts' activations."""

    name: str  # as --moe-router-force-routing takes it
    budget: float | None  # MiB

    def __str__(self) -> str:
        return self.name if self.budget is None else f"{self.name}, budget {self.budget:g} MiB"

    @property
    def flags(self) -> list[str]:
        flags = ["--moe-router-force-routing", self.name]
        if self.budget is not None:
            flags += ["--moe-activation-budget", str(self.budget)]
        return flags


@dataclass(frozen=True)
class Task:
    """What is measured; the first workload is the one that all are compared with."""

    system: str
    workloads: tuple[ForcedWorkload, ...]
    hidden_size: int
    seq_length: int
    turns: int


@dataclass(frozen=True)
class Measured:
    """One workload on one rank."""

    rows: float  # that this rank's experts received in a pass, over all layers
    seconds: Sequence[float]  # of each pass: forward and backward
    peak_bytes: int
    saved_bytes: int


def format_workloads(task: Task, ranks: Sequence[Sequence[Measured]]) -> str:
    """A line for each workload, of the rank that is worst in each column.

    `ranks`: for each rank, the workloads in the order of `task`.
    """
    by_workload = list(zip(*ranks, strict=True))
    first = by_workload[0]
    lines = [_LINE.format(*_HEADS)]
    for workload, measured in zip(task.workloads, by_workload, strict=True):
        rows = [each.rows for each in measured]
        peak = max(each.peak_bytes for each in measured)
        lines.append(
            _LINE.format(
                str(workload),
                f"{max(rows) / statistics.mean(rows):.2f}",
                f"{statistics.median(_slowest(measured)) * 1e3:,.1f}",
                f"{_times(measured, first):.2f}x",
                f"{peak / 2**20:,.1f}",
                f"{peak / max(each.peak_bytes for each in first):.2f}x",
                f"{max(each.saved_bytes for each in measured) / 2**20:,.1f}",
            )
        )
    return "\n".join(lines)


def _slowest(measured: Sequence[Measured]) -> list[float]:
    """For each turn, the seconds of the slowest rank."""
    return [max(turn) for turn in zip(*(each.seconds for each in measured), strict=True)]


def _times(measured: Sequence[Measured], other: Sequence[Measured]) -> float:
    """The median of the ratios of neighboring turns, in which a slow minute cancels."""
    pairs = zip(_slowest(measured), _slowest(other), strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)
