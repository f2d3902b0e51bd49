"""A run as the page gets it: its facts, curves, routing, findings, options, and how it began."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_parallel.analysis.report.curves import curves_of, routing_of, tokens_and_hours
from moe_parallel.analysis.report.findings import findings_of, loads_of
from moe_parallel.analysis.report.numbers import short
from moe_parallel.analysis.report.text_entry import ANALYSIS, text_entry
from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.analysis.study.measures import measures
from moe_parallel.config import read_yaml
from moe_parallel.errors import InputError
from moe_parallel.reading import parse_json, read_lines, read_small
from moe_parallel.telemetry.metrics import METRICS_FILE, MetricsLine, read_metrics

CONFIG, STARTS = "config.yaml", "starts.jsonl"

RunOptions = dict[str, Any]


def run_entry(folder: Path, name: str) -> dict[str, Any]:
    """The entry of the run in `folder`. Raises InputError if it has no readable metrics."""
    metrics = folder / METRICS_FILE
    records = read_metrics(metrics)
    if not records:
        raise InputError(f"{metrics} is empty: let the run reach its first logged iteration")
    options, starts = _options(folder), _starts(folder)
    try:
        measured = _measured(records, options)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"{metrics} has lines in another form ({type(error).__name__}: {error}): did "
            "this program write it?"
        ) from error
    return {
        "name": name,
        "path": str(folder),
        **measured,
        "options": {flag: _text(value) for flag, value in options.items()},
        "text": text_entry(folder / ANALYSIS) if (folder / ANALYSIS).is_dir() else None,
        "starts": starts,
        "again": None if starts else _command(folder),
        "versions": starts[-1].get("versions") if starts else _versions_of_checkpoint(folder),
    }


def _measured(records: list[MetricsLine], options: RunOptions) -> dict[str, Any]:
    """What the records show."""
    history = RunHistory.from_records(records)
    train_iters = options.get("train-iters")
    findings = findings_of(history, train_iters if type(train_iters) is int else None)
    return {
        "facts": _facts(history, options),
        "findings": [asdict(finding) for finding in findings],
        "loads": list(loads_of(history)),
        "clock": tokens_and_hours(history),
        "curves": curves_of(history),
        "routing": routing_of(history),
    }


def _facts(history: RunHistory, options: RunOptions) -> dict[str, Any]:
    routing = history.routing
    numbers = {name: short(value) for name, value in measures(history).items()}
    return {
        "system": options.get("expert-selection") if options.get("num-experts") else "dense",
        "layers": None if routing is None else len(routing.layers),
        "experts": None if routing is None else routing.num_experts,
        "iterations": history.last_iteration,
        "tokens": history.consumed_tokens,
        **numbers,
    }


def _options(folder: Path) -> RunOptions:
    """config.yaml; {} if there is none. A file that is not YAML raises InputError."""
    path = folder / CONFIG
    content = read_yaml(path, flag="") if path.exists() else {}
    return {name.replace("_", "-"): value for name, value in content.items()}


def _starts(folder: Path) -> list[dict[str, Any]]:
    """The lines of starts.jsonl that can be read; [] for a run of an earlier version."""
    path = folder / STARTS
    if not path.is_file():
        return []
    found = []
    for line in read_lines(path):
        try:
            start = parse_json(line)
        except ValueError:  # a process was killed while it wrote
            continue
        if isinstance(start, dict):
            found.append(start)
    return found


def _command(folder: Path) -> str | None:
    """A command that repeats a run which did not record its own."""
    config = folder / CONFIG
    words = ["python", "pretrain_gpt_moe.py", "--config", str(config), "--save", f"{folder}-again"]
    return shlex.join(words) if config.is_file() else None


def _versions_of_checkpoint(folder: Path) -> dict[str, Any] | None:
    for path in sorted(folder.glob("iter_*/checkpoint.json"), reverse=True):
        try:
            versions = parse_json(read_small(path)).get("versions")
        except (ValueError, OSError, AttributeError):
            continue
        if isinstance(versions, dict):
            return versions
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
