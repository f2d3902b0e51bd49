"""Small sources of a report on disk, made by hand."""

import json
from pathlib import Path
from typing import Any

from moe_parallel.analysis.routing import (
    AnalysisTotals,
    View,
    specialization,
    tables_of,
    write_facts,
    write_tables,
)
from tests.analysis.selections import random_selections
from tests.analysis.synthetic import synthetic_run

CELLS = """\
nodes,ranks,ep,global_batch_size,tokens_per_second,efficiency,step_seconds,compute_seconds,\
dispatch_seconds,pipeline_seconds,reduce_seconds,rest_seconds,planned_tokens_per_second,plan_error,\
axis
1,8,all,32,1000.0,1.0,1.3,1.2,0.0,0.0,0.1,0.0,,,nodes
2,16,all,32,1800.0,0.9,0.7,0.5,0.1,0.0,0.1,0.0,2000.0,0.11,nodes
"""


def run_folder(
    path: Path,
    records: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
    starts: list[dict[str, Any]] | None = None,
) -> Path:
    """A run with metrics, configuration and starts."""
    path.mkdir(parents=True)
    records = synthetic_run(logged=30, layers=3) if records is None else records
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    given = {"expert-selection": "aoe", "num-experts": 8, "train-iters": 300}
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in (given | (options or {})).items()]
    (path / "config.yaml").write_text("".join(lines))
    if starts is not None:
        lines = [json.dumps(start) + "\n" for start in starts]
        (path / "starts.jsonl").write_text("".join(lines))
    return path


def scaling_folder(path: Path) -> Path:
    path.mkdir()
    (path / "scaling.csv").write_text(CELLS)
    return path


def analysis_folder(path: Path, *, layers: int = 2, experts: int = 4) -> Path:
    """An analysis of two texts, whose items are all "<i>"; 30 tokens of each to be read, or 600."""
    path.mkdir()
    tokens = 30 if layers < 10 else 600
    numbers = list(range(1, layers + 1))
    totals = AnalysisTotals(numbers, experts, ["<i>"] * 7)
    view = View(tokens)
    for favorite, text in enumerate(("code", "prose")):
        selections = random_selections(
            text, 0, sequences=tokens // 10, length=10, layers=layers, experts=experts,
            favorite=favorite,
        )  # fmt: skip
        totals.add(selections)
        view.add(selections)
    tests = specialization(totals.blocks, numbers, 19, seed=0)
    pieces = ["<i>"] * len(view.columns["token"])
    write_tables(path, tables_of(totals, tests) | {"view": {**view.columns, "piece": pieces}})
    facts = {"tokens": {"code": tokens, "prose": tokens}, "layers": numbers, "experts": experts}
    write_facts(path, facts | {"permutations": 19})
    return path
