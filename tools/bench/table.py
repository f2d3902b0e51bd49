"""Rows as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tools.bench.results import BenchResult, BenchRow, times_as_fast

DIFFERS = "DIFFERS"
_LAST = "{:>9}{:>11}{:>10}{:>10}"
_LAST_HEADS = ("of max", "our speed", "peak MiB", "saved MiB")
_LINE = "  {:<28}{:>12}  {:<21}{:>9}" + _LAST
_MODEL_LINE = "  {:<32}{:>8}{:>9}  {:<18}{:>9}" + _LAST


def format_row(row: BenchRow) -> str:
    """A title, and a line for each contender that was measured."""
    head = _LINE.format("", "us", "quartiles", row.unit, *_LAST_HEADS)
    lines = [_line(row, result) for result in row.results if result.absent is None]
    return "\n".join([_title(row), head, *lines])


def format_model_row(row: BenchRow, tokens: int, weights: Mapping[str, int]) -> str:
    """The same for whole models, with their parameters and the speed in tokens."""
    head = _MODEL_LINE.format("", "params", "ms", "quartiles", "tokens/s", *_LAST_HEADS)
    lines = [
        _MODEL_LINE.format(
            result.name,
            f"{weights[result.name] / 1e6:.2f}M",
            f"{result.median * 1e3:,.0f}",
            _quartiles(result, 1e3),
            f"{tokens / result.median:,.0f}",
            *_last(row, result),
        ).rstrip()
        for result in row.results
        if result.absent is None
    ]
    return "\n".join([_title(row), head, *lines])


def format_absent(rows: Iterable[BenchRow]) -> str:
    """The absent contenders, a line for each reason; empty if there are none."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        for result in row.results:
            if result.absent is not None:
                names.setdefault(result.absent, {})[result.name] = None
    lines = [f"  {', '.join(who)}: {reason}" for reason, who in names.items()]
    return "\n".join(["absent:", *lines]) if lines else ""


def format_launched(rows: Iterable[BenchRow]) -> str:
    """What was timed without a CUDA graph, a line for each reason; empty if there is nothing."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        for result in (row.ceiling, *row.results):
            if result.without_graph is not None:
                names.setdefault(result.without_graph, {})[f"{row.op} {result.name}"] = None
    lines = [f"  {reason}: {', '.join(who)}" for reason, who in names.items()]
    return "\n".join(["timed without a CUDA graph:", *lines]) if lines else ""


def speed_of_ours(row: BenchRow, result: BenchResult) -> str:
    """Our speed over that of a contender; empty for ours itself."""
    if result.differs is not None:
        return DIFFERS
    return "" if result is row.ours else f"{times_as_fast(row.ours, result):.2f}x"


def _title(row: BenchRow) -> str:
    return f"{row.title}   ({row.ceiling.name} {row.rate(row.ceiling):,.1f} {row.unit})"


def _line(row: BenchRow, result: BenchResult) -> str:
    line = _LINE.format(
        result.name,
        f"{result.median * 1e6:,.1f}",
        _quartiles(result, 1e6),
        f"{row.rate(result):,.1f}",
        *_last(row, result),
    ).rstrip()
    return line if result.differs is None else f"{line}\n    {result.differs}"


def _quartiles(result: BenchResult, scale: float) -> str:
    first, third = (f"{value * scale:,.0f}" for value in result.quartiles)
    return f"[{first} .. {third}]"


def _last(row: BenchRow, result: BenchResult) -> tuple[str, str, str, str]:
    """The last columns, `_LAST_HEADS`."""
    return (
        f"{100 * row.share(result):.1f}%",
        speed_of_ours(row, result),
        _mebibytes(result.peak_bytes),
        _mebibytes(result.saved_bytes),
    )


def _mebibytes(amount: int | None) -> str:
    return "" if amount is None else f"{amount / 2**20:,.2f}"
