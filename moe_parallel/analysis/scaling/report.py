"""The table of a scaling study, and the files of its report."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from moe_parallel.analysis.scaling.figure import scaling_figure
from moe_parallel.analysis.scaling.rows import Row


def write_scaling_report(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write scaling.csv and scaling.png; the files."""
    table, figure = folder / "scaling.csv", folder / "scaling.png"
    with table.open("w", newline="") as file:
        columns = list(dict.fromkeys(name for row in rows for name in row.values))
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.values for row in rows)
    scaling_figure(rows).savefig(figure, dpi=110)
    return [table, figure]
