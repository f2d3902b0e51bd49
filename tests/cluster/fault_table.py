"""The table of faults in docs/reliability.md, written by the tests that saw them."""

from __future__ import annotations

import fcntl
import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.fault_cases import MOMENTS

LONGEST = 60  # characters of a line in the table
NO_CASE = "–"
BEGIN, END = "<!-- faults on a cluster -->\n", "<!-- end -->\n"
COLUMNS = ("fault", *MOMENTS, "started again by", "printed")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


@dataclass
class FaultTable:
    """One row per fault: how long the run took to its end after each moment, and what was seen."""

    rows: dict[str, dict[str, str]] = field(default_factory=dict)  # fault, column, cell

    def add(self, case: tuple[str, str], line: str, again: str, seconds: float) -> None:
        """A cell of a case, a fault and a moment.

        `line`: what the user saw; `seconds`: from the fault to the complete run.
        """
        line = re.sub(r"\S*/(run)\b", r"runs/my", line).replace("|", "\\|")
        line = re.sub(r"(20\d\d-[-\dT:]+|\b\d+\.\d+(?= ON))", "...", line)
        if len(line) > LONGEST:
            line = line[:LONGEST].rpartition(" ")[0] + " ..."
        fault, moment = case
        cells = {moment: f"{seconds:.0f} s", "started again by": again, "printed": f"`{line}`"}
        self.rows.setdefault(fault, {}).update(cells)

    def write(self, page: Path) -> None:
        """Renew the cells in a page's table. Those of cases that were not run stay.

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
        rows = _rows(table)
        for fault, cells in self.rows.items():
            rows[fault] = dict.fromkeys(MOMENTS, NO_CASE) | rows.get(fault, {}) | cells
        lines = (
            " | ".join([fault, *(cells[column] for column in COLUMNS[1:])])
            for fault, cells in rows.items()
        )
        table = HEAD + "".join(f"| {line} |\n" for line in lines)
        page.write_text(before + BEGIN + table + END + after, encoding="utf-8")


def cells_of(page: Path) -> dict[tuple[str, str], str]:
    """Fault and moment of every cell with a time, or with `NO_CASE`, in a page's table."""
    table = page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = _rows(table).items()
    return {(fault, moment): cells[moment] for fault, cells in rows for moment in MOMENTS}


def _rows(table: str) -> dict[str, dict[str, str]]:
    rows = {}
    for line in table.removeprefix(HEAD).splitlines():
        # A bar in a printed line is escaped, and so is not between two spaces.
        fault, *cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        rows[fault] = dict(zip(COLUMNS[1:], cells, strict=True))
    return rows
