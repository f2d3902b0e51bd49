"""The table of faults in docs/reliability.md, written by the tests that saw them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

BEGIN, END = "<!-- faults on a cluster -->\n", "<!-- end -->\n"
HEAD = "| fault | moment | printed | started again by | complete after |\n|---|---|---|---|---|\n"


@dataclass
class FaultTable:
    """One row per case."""

    rows: list[str] = field(default_factory=list)

    def add(self, fault: str, moment: str, line: str, again: str, seconds: float) -> None:
        """`line`: what the user saw; `seconds`: from the fault to the complete run."""
        line = re.sub(r"\S*/(run)\b", r"runs/my", line).replace("|", "\\|")
        line = re.sub(r"(20\d\d-[-\dT:]+|\b\d+\.\d+(?= ON))", "...", line)
        self.rows.append(f"| {fault} | {moment} | `{line}` | {again} | {seconds:.0f} s |\n")

    def write(self, page: Path) -> None:
        """Replace the table in a page."""
        text = page.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        assert rest and after, f"{page} has no place for the table"
        page.write_text(before + BEGIN + HEAD + "".join(self.rows) + END + after, encoding="utf-8")
