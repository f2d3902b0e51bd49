"""The report: from the folders of runs and studies to one page of HTML.

The page is one file with the style, the program and the data inside. The browser is told to load
nothing and to run no other script (Content-Security-Policy). The data are JSON in which no
character can end the element that holds them, and the program writes them only as text, so a run
name with tags in it is shown and not run.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import io
import json
import math
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import moe_parallel
from moe_parallel.analysis.report.run_entry import run_entry
from moe_parallel.analysis.study.folder import STUDY_MANIFEST, StudyFolder
from moe_parallel.errors import InputError
from moe_parallel.reading import read_small
from moe_parallel.telemetry.metrics import METRICS_FILE

SCALING = "scaling.csv"
#: The parts of the program, in the order in which they are joined.
SCRIPTS = ("elements.js", "figures.js", "runs.js", "experts.js", "texts.js", "scaling.js",
           "start.js")  # fmt: skip


def report_of(
    paths: Sequence[Path],
    *,
    title: str | None = None,
    command: Sequence[str] = (),
    advance: Callable[[int], object] = lambda done: None,
) -> str:
    """The HTML page about runs and studies; see `find_sources` for what `paths` may be.

    Args:
        title: the heading; by default the names of the runs.
        command: the words that made the report, shown at its end.
        advance: called with 1 after each run.

    Raises InputError.
    """
    folders, scaling = find_sources(paths)
    runs = []
    for name, folder in folders:
        runs.append(run_entry(folder, name))
        advance(1)
    names = [each["name"] for each in (*runs, *scaling)]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    content = {"command": shlex.join(command), "runs": runs, "scaling": scaling}
    return page_of(content, title or ", ".join(names[:4]) + more)


def find_sources(paths: Sequence[Path]) -> tuple[list[tuple[str, Path]], list[dict[str, Any]]]:
    """(name and folder of each run, name and rows of each scaling study), by the paths' contents.

    - a folder with metrics.jsonl: a run
    - a folder with study.json: every run of the study that has metrics
    - a folder with scaling.csv: the figures of a scaling study

    Raises InputError for anything else, and if nothing is left.
    """
    scaling: list[dict[str, Any]] = []
    folders: dict[Path, int] = {}  # with the least number of parts of the name
    for path in paths:
        if (path / METRICS_FILE).is_file():
            folders.setdefault(path, 1)
        elif (path / STUDY_MANIFEST).is_file():
            folders |= dict.fromkeys(_cells(path), 2)  # contender/seed
        elif (path / SCALING).is_file():
            scaling.append({"name": path.resolve().name, "rows": _rows(path / SCALING)})
        elif path.exists():
            raise InputError(
                f"{path}: has no {METRICS_FILE}, {STUDY_MANIFEST} or {SCALING}: name a run or a "
                "study"
            )
        else:
            raise InputError(f"{path}: there is no such folder: name the folder that --save named")
    names = short_names([folder.resolve() for folder in folders], list(folders.values()))
    return list(zip(names, folders, strict=True)), scaling


def _cells(study: Path) -> list[Path]:
    manifest = StudyFolder(study).manifest()
    assert manifest is not None
    cells = StudyFolder(study).cells(manifest.seeds)
    found = [cell.folder for cell in cells if (cell.folder / METRICS_FILE).is_file()]
    if not found:
        raise InputError(f"{study}: no run of the study has metrics yet: let one begin")
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    def number(text: Any) -> Any:
        try:
            return float(text) if math.isfinite(float(text)) else None
        except (TypeError, ValueError):
            return text or None

    try:
        table = csv.DictReader(io.StringIO(read_small(path).decode("utf-8"), newline=""))
        rows = [{key: number(value) for key, value in row.items()} for row in table]
    except (OSError, ValueError, csv.Error):
        rows = []
    if not rows or "tokens_per_second" not in rows[0] or "nodes" not in rows[0]:
        raise InputError(f"{path} is not a table of tools/study/scaling.py report: write it again")
    return rows


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


def page_of(content: dict[str, Any], title: str) -> str:
    """The HTML of a report. `content`: JSON, see `report_of`."""
    script = '"use strict";\n' + "\n".join(_part(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    made = {
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": moe_parallel.__version__,
    }
    values = {
        "POLICY": policy,
        # What UTF-8 does not have becomes "?".
        "TITLE": html.escape(title.encode("utf-8", "replace").decode("utf-8")),
        "STYLE": _part("page.css"),
        "DATA": json_in_html({"title": title, "made": made, **content}),
        "SCRIPT": script,
    }
    pieces = _part("page.html").split("@@")
    return "".join(values[piece] if n % 2 else piece for n, piece in enumerate(pieces))


def json_in_html(content: Any) -> str:
    """Compact JSON without <, > and &, so that nothing in it can end or open an element.

    Lone surrogates, which UTF-8 does not have, stay escaped as JSON has them.
    """
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _part(name: str) -> str:
    folder = resources.files("moe_parallel.analysis.report") / "page"
    return (folder / name).read_text(encoding="utf-8")
