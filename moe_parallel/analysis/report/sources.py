"""What the arguments of a report are: runs, studies, scaling studies and plans."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_parallel.analysis.study.folder import STUDY_MANIFEST, StudyFolder
from moe_parallel.errors import InputError
from moe_parallel.reading import parse_json, read_small
from moe_parallel.telemetry.metrics import METRICS_FILE

SCALING = "scaling.csv"

#: What the page shows of a planned layout.
PLANNED = (
    "layout",
    "memory",
    "seconds",
    "seconds_by_part",
    "tokens_per_second_and_gpu",
    "model_tflops_per_gpu",
)


@dataclass
class Sources:
    """The parts of a report."""

    runs: list[tuple[str, Path]] = field(default_factory=list)  # (name, folder)
    scaling: list[dict[str, Any]] = field(default_factory=list)  # {name, rows}
    plans: list[dict[str, Any]] = field(
        default_factory=list
    )  # {name, plan: {gpus, plans, refused}}


def find_sources(paths: Sequence[Path]) -> Sources:
    """Recognizes each path by its content.

    - a folder with metrics.jsonl: a run
    - a folder with study.json: every run of the study that has metrics
    - a folder with scaling.csv: the figures of a scaling study
    - a .json file: what tools/plan.py --json printed

    Raises InputError for anything else, and if nothing is left.
    """
    sources = Sources()
    folders: dict[Path, int] = {}  # with the least number of parts of the name
    for path in paths:
        if path.is_file():
            sources.plans.append({"name": path.stem, "plan": _plan(path)})
        elif (path / METRICS_FILE).is_file():
            folders.setdefault(path, 1)
        elif (path / STUDY_MANIFEST).is_file():
            folders |= dict.fromkeys(_cells(path), 2)  # contender/seed
        elif (path / SCALING).is_file():
            sources.scaling.append({"name": path.resolve().name, "rows": _rows(path / SCALING)})
        else:
            raise InputError(_unknown(path))
    names = short_names([folder.resolve() for folder in folders], list(folders.values()))
    sources.runs = list(zip(names, folders, strict=True))
    return sources


def _unknown(path: Path) -> str:
    if not path.exists():
        return f"{path}: there is no such folder or file: name the folder that --save named"
    return (
        f"{path}: has no {METRICS_FILE}, {STUDY_MANIFEST} or {SCALING}: name a run, a study, or a "
        ".json file of tools/plan.py --json"
    )


def _cells(study: Path) -> list[Path]:
    manifest = StudyFolder(study).manifest()
    assert manifest is not None
    cells = StudyFolder(study).cells(manifest.seeds)
    found = [cell.folder for cell in cells if (cell.folder / METRICS_FILE).is_file()]
    if not found:
        raise InputError(f"{study}: no run of the study has metrics yet: let one begin")
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        table = csv.DictReader(io.StringIO(read_small(path).decode("utf-8"), newline=""))
        rows = [{key: _number(value) for key, value in row.items()} for row in table]
    except (OSError, ValueError, csv.Error):
        rows = []
    if not rows or "tokens_per_second" not in rows[0] or "nodes" not in rows[0]:
        raise InputError(f"{path} is not a table of tools/study/scaling.py report: write it again")
    return rows


def _number(text: Any) -> Any:
    try:
        return float(text) if math.isfinite(float(text)) else None
    except (TypeError, ValueError):
        return text or None


def _plan(path: Path) -> dict[str, Any]:
    try:
        plan = parse_json(read_small(path))
        return {
            "gpus": plan["cluster"]["gpus"],
            "plans": [{name: each[name] for name in PLANNED} for each in plan["plans"]],
            "refused": len(plan["refused"]),
        }
    except (ValueError, OSError, LookupError, TypeError):
        raise InputError(
            f"{path} is not a plan: give a file with the output of tools/plan.py --json"
        ) from None


def short_names(paths: Sequence[Path], fewest: Sequence[int]) -> list[str]:
    """The last parts of each path: at least `fewest` of them, and as many as make it differ from
    the others."""
    parts = [path.parts for path in paths]
    names = []
    for mine, length in zip(parts, fewest, strict=True):
        while length < len(mine) and sum(mine[-length:] == other[-length:] for other in parts) > 1:
            length += 1
        names.append("/".join(mine[-length:]).lstrip("/"))
    return names
