"""The report: from the folders of runs to the text of the page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_parallel.analysis.report.page_file import page_of
from moe_parallel.analysis.report.run_entry import run_entry
from moe_parallel.analysis.report.sources import Sources, find_sources


def report_of(
    paths: Sequence[Path],
    *,
    title: str | None = None,
    command: Sequence[str] = (),
    advance: Callable[[int], object] = lambda done: None,
) -> str:
    """The HTML page about runs, studies and plans; see `find_sources` for what `paths` may be.

    Args:
        title: the heading; by default the names of the runs.
        command: the words that made the report, shown at its end.
        advance: called with 1 after each run.

    Raises InputError.
    """
    sources = find_sources(paths)
    runs = []
    for name, folder in sources.runs:
        runs.append(run_entry(folder, name))
        advance(1)
    content: dict[str, Any] = {
        "command": shlex.join(command),
        "runs": runs,
        "scaling": sources.scaling,
        "plans": sources.plans,
    }
    return page_of(content, title or _title(sources))


def _title(sources: Sources) -> str:
    names = [name for name, _ in sources.runs]
    names += [each["name"] for each in [*sources.scaling, *sources.plans]]
    shown = ", ".join(names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
