"""Compare two files of `run.py --json`, row by row.

    python tools/bench/compare.py before.json after.json

The table has each contender's speed before and after, and the ratio. If the machines or their load
differ, compare the shares of the ceiling, because each run measured its own ceiling. `~` marks a
change within the spread: the quartiles overlap. Exit codes: 0 compared, 2 a wrong flag or file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.tool import Tool
from tools.bench.results import BenchResult, BenchRow, read_json
from tools.bench.table import DIFFERS

_LINE = "  {:<28}{:>12}{:>12}{:>9} {:1}{:>9}{:>9}{:>11}{:>11}"


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("before", type=Path, metavar="BEFORE.json", help="the earlier results")
    tool.add_argument("after", type=Path, metavar="AFTER.json", help="the later results")
    return tool.run(arguments, _print_comparison)


def _print_comparison(own: argparse.Namespace) -> None:
    before, after = (read_json(path) for path in (own.before, own.after))
    for name, (about, _) in (("before", before), ("after", after)):
        print(f"{name:<7} {about['command']}   ({about['date']})\n        {about['machine']}")
    print(compare(before[1], after[1]))


def compare(before: list[BenchRow], after: list[BenchRow]) -> str:
    """The change of each row and contender that both files have, and the names of the others."""
    earlier = {row.key: row for row in before}
    later = {row.key: row for row in after}
    both = [key for key in earlier if key in later]
    parts = [_compare_row(earlier[key], later[key]) for key in both]
    for name, ones, others in (("before", earlier, later), ("after", later, earlier)):
        alone = [row.title for key, row in ones.items() if key not in others]
        parts += [f"only {name}: {title}" for title in alone]
    return "\n".join(["", *parts]) if parts else "\nno rows"


def _compare_row(before: BenchRow, after: BenchRow) -> str:
    head = _LINE.format("", "us before", "after", "speed", "", "of max", "after", "peak", "saved")
    lines = [
        _line(result.name, before, result, after, after.result(result.name))
        for result in before.results
    ]
    new = [r.name for r in after.results if before.result(r.name) is None and r.absent is None]
    lines += [f"  {name:<28}only after" for name in new]
    return "\n".join([before.title, head.rstrip(), *filter(None, lines)]) + "\n"


def _line(
    name: str, row: BenchRow, was: BenchResult, row_now: BenchRow, now: BenchResult | None
) -> str | None:
    """The line of a contender. None if neither run has it."""
    gone = now is None or now.absent is not None
    if was.absent is not None or gone:
        if was.absent is not None and gone:
            return None
        return f"  {name:<28}only {'before' if gone else 'after'}"
    if was.differs is not None or now.differs is not None:
        return f"  {name:<28}{DIFFERS} {'before' if was.differs else 'after'}"
    return _LINE.format(
        name,
        f"{was.median * 1e6:,.1f}",
        f"{now.median * 1e6:,.1f}",
        f"{was.median / now.median:.2f}x",
        "~" if _overlap(was, now) else "",
        f"{100 * row.share(was):.1f}%",
        f"{100 * row_now.share(now):.1f}%",
        _change(was.peak_bytes, now.peak_bytes),
        _change(was.saved_bytes, now.saved_bytes),
    ).rstrip()


def _overlap(one: BenchResult, other: BenchResult) -> bool:
    (first, third), (other_first, other_third) = one.quartiles, other.quartiles
    return first <= other_third and other_first <= third


def _change(before: int | None, after: int | None) -> str:
    """The change of a number of bytes in percent; empty if there were none."""
    if not before or after is None:
        return ""
    return "=" if before == after else f"{100 * (after / before - 1):+.1f}%"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
