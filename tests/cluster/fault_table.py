"""The table of faults in docs/reliability.md, written by the tests that saw them."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LONGEST = 140  # characters of a line in the table
MOMENTS = ("before the start", "at start", "in a step", "in a save", "in an evaluation")
BEGIN, END = "<!-- faults on a cluster -->\n", "<!-- end -->\n"
HEAD = (
    "| fault | moment | printed | started again by | complete after | at most |\n"
    "|---|---|---|---|---|---|\n"
)
NOT_TESTED, NOT_TESTED_END = "<!-- not tested -->\n", "<!-- end of not tested -->\n"


@dataclass
class FaultTable:
    """One row per case: a fault at a moment."""

    rows: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(
        self, case: tuple[str, str], line: str, again: str, seconds: float, within: int
    ) -> None:
        """A row of a case, a fault and a moment.

        `line`: what the user saw; `seconds`: from the fault to the complete run; `within`: the
        number of seconds after which the test fails.
        """
        line = re.sub(r"\S*/(run)\b", r"runs/my", line).replace("|", "\\|")
        if len(line) > LONGEST:
            line = line[:LONGEST].rpartition(" ")[0] + " ..."
        line = re.sub(r"(20\d\d-[-\dT:]+|\b\d+\.\d+(?= ON))", "...", line)
        fault, moment = case
        row = f"| {fault} | {moment} | `{line}` | {again} | {seconds:.0f} s | {within} s |"
        self.rows[case] = f"{row}\n"

    def write(self, page: Path) -> None:
        """Renew the rows in a page's table. Those of cases that were not run stay.

        Several test processes may write one after the other.
        """
        with page.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._renew(page)

    def _renew(self, page: Path) -> None:
        text = page.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        table, _, after = rest.partition(END)
        assert rest and after, f"{page} has no place for the table"
        old = table.removeprefix(HEAD).splitlines(keepends=True)
        rows = {case_of(row): row for row in old} | self.rows
        faults = list(dict.fromkeys(fault for fault, _ in rows))
        ordered = sorted(rows, key=lambda case: (faults.index(case[0]), MOMENTS.index(case[1])))
        text = "".join(rows[case] for case in ordered)
        page.write_text(before + BEGIN + HEAD + text + END + after, encoding="utf-8")


def case_of(row: str) -> tuple[str, str]:
    """The fault and the moment of a row."""
    _, fault, moment, _ = row.split("|", 3)
    return fault.strip(), moment.strip()


def rows_of(page: Path) -> set[tuple[str, str]]:
    """The cases in a page's table."""
    table = _between(page.read_text(encoding="utf-8"), BEGIN, END).removeprefix(HEAD)
    return {case_of(row) for row in table.splitlines()}


def not_tested_rows(reasons: Mapping[tuple[str, str], str]) -> str:
    """A table of the combinations without a case: (fault, moment) and the reason of each."""
    moments: dict[tuple[str, str], list[str]] = {}
    for (fault, moment), reason in reasons.items():
        moments.setdefault((fault, reason), []).append(moment)
    return "| fault | moment | why there is no case |\n|---|---|---|\n" + "".join(
        f"| {fault} | {', '.join(which)} | {reason} |\n"
        for (fault, reason), which in moments.items()
    )


def not_tested_of(page: Path) -> str:
    """The page's table of combinations without a case."""
    return _between(page.read_text(encoding="utf-8"), NOT_TESTED, NOT_TESTED_END)


def _between(text: str, begin: str, end: str) -> str:
    return text.partition(begin)[2].partition(end)[0]
