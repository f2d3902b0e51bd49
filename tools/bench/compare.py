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
from tools.bench.results import DIFFERS, BenchResult, BenchRow, read_json

_LINE = "  {:<32}{:>12}{:>12}{:>9} {:1}{:>9}{:>9}{:>11}{:>11}"
_HEADS = ("", "us before", "after", "speed", "", "of max", "after", "peak", "saved")


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
    earlier, later = ({row.title: row for row in rows} for rows in (before, after))
    lines = []
    for title in (each for each in earlier if each in later):
        was, now = earlier[title], later[title]
        lines += ["", title, _LINE.format(*_HEADS).rstrip()]
        ones, others = (
            {result.name: result for result in row.results if result.absent is None}
            for row in (was, now)
        )
        for name in dict.fromkeys([*ones, *others]):
            if name in ones and name in others:
                lines.append(_line(was, ones[name], now, others[name]))
            else:
                lines.append(f"  {name:<32}only {'before' if name in ones else 'after'}")
    lines += [f"only before: {title}" for title in earlier if title not in later]
    lines += [f"only after: {title}" for title in later if title not in earlier]
    return "\n".join(lines) or "no rows"


def _line(row: BenchRow, was: BenchResult, row_now: BenchRow, now: BenchResult) -> str:
    if was.differs is not None or now.differs is not None:
        return f"  {was.name:<32}{DIFFERS} {'before' if was.differs else 'after'}"
    (first, third), (first_now, third_now) = was.quartiles, now.quartiles
    return _LINE.format(
        was.name,
        f"{was.median * 1e6:,.1f}",
        f"{now.median * 1e6:,.1f}",
        f"{was.median / now.median:.2f}x",
        "~" if first <= third_now and first_now <= third else "",
        f"{100 * row.share(was):.1f}%",
        f"{100 * row_now.share(now):.1f}%",
        _change(was.peak_bytes, now.peak_bytes),
        _change(was.saved_bytes, now.saved_bytes),
    ).rstrip()


def _change(before: int | None, after: int | None) -> str:
    """The change of a number of bytes in percent; empty if there were none."""
    if not before or after is None:
        return ""
    return "=" if before == after else f"{100 * (after / before - 1):+.1f}%"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
