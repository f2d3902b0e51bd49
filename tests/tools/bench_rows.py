"""Rows as from a run, without any timing, and those of a file of --json."""

import json
from pathlib import Path
from typing import Any

from tools.bench.results import BenchResult, BenchRow

MILLISECOND = 1e-3


def result(name: str, *milliseconds: float, **fields: object) -> BenchResult:
    return BenchResult(name, [value * MILLISECOND for value in milliseconds], **fields)


def row(*results: BenchResult, ceiling: tuple[float, ...] = (), **fields: object) -> BenchRow:
    """A row whose ceiling takes 1 ms in every turn by default."""
    ceiling = ceiling or (1.0,) * len(results[0].samples)
    about: dict[str, object] = {
        "op": "permute",
        "timed": "forward",
        "size": "T=8 d=4",
        "dtype": "float32",
        "unit": "GB/s",
        "amount": 2e6,
    }
    return BenchRow(ceiling=result("copy", *ceiling), results=list(results), **about | fields)


def read_json(path: Path) -> tuple[dict[str, Any], list[BenchRow]]:
    """What is known of the run, and its rows."""
    about = json.loads(path.read_text())
    rows = [
        BenchRow(
            **row
            | {"ceiling": BenchResult(**row["ceiling"])}
            | {"results": [BenchResult(**result) for result in row["results"]]}
        )
        for row in about.pop("rows")
    ]
    return about, rows
