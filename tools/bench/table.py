"""Rows as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tools.bench.results import Result, Row, times_as_fast

DIFFERS = "DIFFERS"
_MODEL_LINE = "  {:<32}{:>8}{:>9}  {:<18}{:>9}{:>9}{:>9}{:>10}{:>10}"
_LINE = "  {:<28}{:>12}  {:<21}{:>9}{:>9}{:>9}{:>10}{:>10}"


def format_row(row: Row) -> str:
    """A title, and a line for each contender that was measured."""
    ceiling = f"{row.ceiling.name} {row.rate(row.ceiling):,.1f} {row.unit}"
    head = _LINE.format(
        "", "us", "quartiles", row.unit, "of max", "ours/it", "peak MiB", "saved MiB"
    )
    lines = [_line(row, result) for result in row.results if result.absent is None]
    return "\n".join([f"{row.title}   ({ceiling})", head.rstrip(), *lines])


def format_model_row(row: Row, tokens: int, weights: Mapping[str, int]) -> str:
    """The same for whole models, with their parameters and the speed in tokens."""
    head = _MODEL_LINE.format(
        "", "params", "ms", "quartiles", "tokens/s", "of max", "ours/it", "peak MiB", "saved MiB"
    )
    title = f"{row.title}   ({row.ceiling.name} {row.rate(row.ceiling):,.1f} {row.unit})"
    lines = [title, head.rstrip()]
    for result in row.results:
        if result.absent is None:
            first, third = (f"{value * 1e3:,.0f}" for value in result.quartiles)
            line = _MODEL_LINE.format(
                result.name,
                f"{weights[result.name] / 1e6:.2f}M",
                f"{result.median * 1e3:,.0f}",
                f"[{first} .. {third}]",
                f"{tokens / result.median:,.0f}",
                f"{100 * row.share(result):.1f} %",
                ratio(row, result),
                _mebibytes(result.peak_bytes),
                _mebibytes(result.saved_bytes),
            )
            lines.append(line.rstrip())
    return "\n".join(lines)


def format_absent(rows: Iterable[Row]) -> str:
    """The absent contenders, a line for each reason; empty if there are none."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        for result in row.results:
            if result.absent is not None:
                names.setdefault(result.absent, {})[result.name] = None
    lines = [f"  {', '.join(who)}: {reason}" for reason, who in names.items()]
    return "\n".join(["absent:", *lines]) if lines else ""


def ratio(row: Row, result: Result) -> str:
    """How many times as fast ours is; empty for ours itself, and if outputs disagree."""
    if result.differs is not None:
        return DIFFERS
    return "" if result is row.ours else f"{times_as_fast(row.ours, result):.2f}x"


def _line(row: Row, result: Result) -> str:
    first, third = (f"{value * 1e6:,.0f}" for value in result.quartiles)
    line = _LINE.format(
        result.name,
        f"{result.median * 1e6:,.1f}",
        f"[{first} .. {third}]",
        f"{row.rate(result):,.1f}",
        f"{100 * row.share(result):.1f} %",
        ratio(row, result),
        _mebibytes(result.peak_bytes),
        _mebibytes(result.saved_bytes),
    ).rstrip()
    return line if result.differs is None else f"{line}\n    {result.differs}"


def _mebibytes(amount: int | None) -> str:
    return "" if amount is None else f"{amount / 2**20:,.2f}"
