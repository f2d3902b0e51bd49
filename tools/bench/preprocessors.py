"""Scripts that tokenize text: what their runs cost, and the comparison of the runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GOAL = 0.8  # our speed, as a multiple of the peer's
_LINE = "  {:<9}{:<14}{:>8}{:>14}{:>14}{:>10}   {}"


@dataclass(frozen=True)
class Preprocessor:
    """A project in a folder whose tools/preprocess_data.py takes these flags for its tokenizer."""

    name: str
    folder: Path
    flags: list[str]


@dataclass(frozen=True)
class Cost:
    """CPU seconds of all processes of a run, and the seconds that it took."""

    cpu_seconds: float
    seconds: float


@dataclass(frozen=True)
class TextRun:
    """A run on the whole text, and one on a few documents, which measures the start."""

    name: str
    workers: int
    whole: Cost
    start: Cost

    @property
    def cpu_seconds(self) -> float:
        """What the text costs beyond the start."""
        return self.whole.cpu_seconds - self.start.cpu_seconds


def same_bytes(one: Path, other: Path) -> bool:
    """Whether the datasets of two output prefixes have the same bytes."""
    return all(
        Path(f"{one}_text_document.{end}").read_bytes()
        == Path(f"{other}_text_document.{end}").read_bytes()
        for end in ("bin", "idx")
    )


def table(contenders: Sequence[Preprocessor], runs: Sequence[TextRun], text_bytes: int) -> str:
    """The medians of all runs. The first contender is ours, which the others are compared with."""
    head = ("workers", "script", "CPU s", "of the start", "MB per CPU s", "seconds", "speed")
    lines = ["", _LINE.format(*head)]
    for workers in dict.fromkeys(run.workers for run in runs):
        ours, *_ = each = [
            [run for run in runs if run.workers == workers and run.name == contender.name]
            for contender in contenders
        ]
        lines += [_line(these, text_bytes, ours) for these in each]
    return "\n".join(lines)


def _line(these: Sequence[TextRun], text_bytes: int, ours: Sequence[TextRun]) -> str:
    cpu = statistics.median(run.cpu_seconds for run in these)
    start = statistics.median(run.start.cpu_seconds for run in these)
    seconds = statistics.median(run.whole.seconds for run in these)
    rate = f"{text_bytes / 1e6 / cpu:.2f}" if cpu > 0 else "-"
    numbers = (f"{cpu:.1f}", f"{start:.1f}", rate, f"{seconds:.1f}")
    verdict = "" if these is ours else _verdict(ours, these)
    return _LINE.format(these[0].workers, these[0].name, *numbers, verdict).rstrip()


def times_as_fast(ours: Sequence[TextRun], theirs: Sequence[TextRun]) -> float:
    """How many times as fast ours is, by CPU seconds: the median of the ratios of the turns."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(other.cpu_seconds / one.cpu_seconds for one, other in pairs)


def _verdict(ours: Sequence[TextRun], theirs: Sequence[TextRun]) -> str:
    if min(run.cpu_seconds for run in (*ours, *theirs)) <= 0:
        return "the text is too short: a run took no longer than its start"
    ratio = times_as_fast(ours, theirs)
    return f"ours {ratio:.2f}x: {'met' if ratio >= GOAL else 'missed'} (goal >= {GOAL}x)"
