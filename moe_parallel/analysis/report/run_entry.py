"""A run as the page gets it: its facts, curves, routing, findings, options, and how it began.

A curve is {x, y}: iterations and values, thinned. The page converts iterations to tokens and hours
by the run's clock.

Shape suffixes: R records, G layers with experts, E experts.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from moe_parallel.analysis.report.findings import findings_of, loads_of
from moe_parallel.analysis.report.numbers import (
    as_bytes,
    bucket_means,
    short,
    shorts,
    slices_of,
    thinned,
)
from moe_parallel.analysis.report.text_entry import ANALYSIS, text_entry
from moe_parallel.analysis.run_history import RunHistory, last_tenth
from moe_parallel.analysis.study.measures import measures
from moe_parallel.config import read_yaml
from moe_parallel.errors import InputError
from moe_parallel.reading import parse_json, read_lines
from moe_parallel.telemetry.metrics import METRICS_FILE, MetricsLine, loss_names, read_metrics

CONFIG, STARTS = "config.yaml", "starts.jsonl"

CLOCK_POINTS = 200
#: The most values of a map of a run over time, of one byte each; it limits the number of moments.
MAP_VALUES = 100_000
#: The most values of the curves of a run's layers, for each measure.
LAYER_VALUES = 6_000
MOST_MOMENTS = 60
#: The load, in multiples of an even share, that the darkest color of a map stands for.
TOP_LOAD = 4.0
#: Fields of a record and of its `machine` that are curves by themselves.
FIELDS = (
    "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_bytes",
    "l1_coefficient", "balance_coefficient", "top_p",
)  # fmt: skip
MACHINE = ("tflops_per_device", "mfu", "joules_per_token", "gpu_watts")

Curves = dict[str, dict[str, list[Any]]]
RunOptions = dict[str, Any]


def run_entry(folder: Path, name: str) -> dict[str, Any]:
    """The entry of the run in `folder`. Raises InputError if it has no readable metrics."""
    metrics = folder / METRICS_FILE
    records = read_metrics(metrics)
    if not records:
        raise InputError(f"{metrics} is empty: let the run reach its first logged iteration")
    options = _options(folder)
    try:
        measured = _measured(RunHistory.from_records(records), options)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"{metrics} has lines in another form ({type(error).__name__}: {error}): did "
            "this program write it?"
        ) from error
    words = {name: v if isinstance(v, str) else json.dumps(v, default=str)
             for name, v in options.items()}  # fmt: skip
    return {
        "name": name,
        "path": str(folder),
        **measured,
        "options": words,
        "text": text_entry(folder / ANALYSIS) if (folder / ANALYSIS).is_dir() else None,
        "starts": _starts(folder),
    }


def _measured(history: RunHistory, options: RunOptions) -> dict[str, Any]:
    """What the records show."""
    train_iters, routing = options.get("train-iters"), history.routing
    findings = findings_of(history, train_iters if type(train_iters) is int else None)
    facts = {
        "system": options.get("expert-selection") if options.get("num-experts") else "dense",
        "layers": None if routing is None else len(routing.layers),
        "experts": None if routing is None else routing.num_experts,
        "iterations": history.last_iteration,
        "tokens": history.consumed_tokens,
        **{name: short(value) for name, value in measures(history).items()},
    }
    return {
        "facts": facts,
        "findings": [asdict(finding) for finding in findings],
        "loads": list(loads_of(history)),
        "clock": tokens_and_hours(history),
        "curves": curves_of(history),
        "routing": routing_of(history),
    }


def _options(folder: Path) -> RunOptions:
    """config.yaml; {} if there is none. A file that is not YAML raises InputError."""
    path = folder / CONFIG
    content = read_yaml(path, flag="") if path.exists() else {}
    return {name.replace("_", "-"): value for name, value in content.items()}


def _starts(folder: Path) -> list[dict[str, Any]]:
    """The lines of starts.jsonl that can be read."""
    path = folder / STARTS
    found = []
    for line in read_lines(path) if path.is_file() else ():
        try:
            start = parse_json(line)
        except ValueError:  # a process was killed while it wrote
            continue
        if isinstance(start, dict):
            found.append(start)
    return found


def curves_of(history: RunHistory) -> Curves:
    """The curves by name: losses, speed, and the routing as means over layers; those of held-out
    domains are loss/DOMAIN and bits/DOMAIN."""
    found: Curves = {"train": _curve(history.train_loss.iterations_R, history.train_loss.values_R)}
    for name, by_domain in (("loss", history.validation), ("bits", history.bits_per_byte)):
        for domain, curve in by_domain.items():
            found[f"{name}/{domain}"] = _curve(curve.iterations_R, curve.values_R)
    rows = [(record["iteration"], _numbers(record)) for record in history.training]
    for name in dict.fromkeys(name for _, numbers in rows for name in numbers):
        points = [(iteration, numbers[name]) for iteration, numbers in rows if name in numbers]
        iterations, values = zip(*points, strict=True)
        found[name] = _curve(np.array(iterations), np.array(values, dtype=np.float64))
    if (routing := history.routing) is not None:
        choices_R = np.maximum(routing.tokens_per_expert_RGE.sum(axis=(1, 2)), 1)
        values_by_name = {
            "ent_load": routing.ent_load_RG.mean(axis=1),
            "ent_conf": routing.ent_conf_RG.mean(axis=1),
            "imbalance": routing.relative_load_RGE().max(axis=(1, 2)),
            "dropped": routing.tokens_dropped_RG.sum(axis=1) / choices_R,
        }
        found |= {name: _curve(routing.iterations_R, v) for name, v in values_by_name.items()}
    return {name: curve for name, curve in found.items() if curve["x"]}


def _curve(iterations_R: np.ndarray, values_R: np.ndarray) -> dict[str, list[Any]]:
    places = thinned(values_R)
    return {"x": iterations_R[places].tolist(), "y": shorts(values_R[places])}


def _numbers(record: MetricsLine) -> dict[str, float]:
    """The single numbers of a record, by the names of their curves."""
    layers = record.get("layers", [])
    machine, rank_load = record.get("machine") or {}, record.get("rank_load") or {}
    # Losses also of systems that are not registered in this process.
    losses = [key for layer in layers for key in layer if key.endswith("_loss")]
    # null stands for a number that was not finite, and stays visible as a gap.
    fields = {name: record[name] for name in FIELDS if name in record}
    values: dict[str, float | None] = {
        **{name: math.nan if value is None else value for name, value in fields.items()},
        **{name: machine.get(name) for name in MACHINE},
        "rank_overload": rank_load.get("overload"),
    }
    for name in (*loss_names(), *losses, "experts_per_token"):
        found = [layer[name] for layer in layers if name in layer]
        if found and None not in found:
            values[name] = float(np.mean(found))
    # Merged experts, of all layers, with a weight above 2 / E. [Lory, Fig. 9]
    used = [
        layer["utilisation"] * len(layer["tokens_per_expert"])
        for layer in layers
        if "utilisation" in layer
    ]
    if used:
        values["experts_used"] = float(sum(used))
    return {name: value for name, value in values.items() if value is not None}


def tokens_and_hours(history: RunHistory) -> dict[str, list[Any]]:
    """Tokens read and hours trained at some iterations, to convert between them.

    The hours are of training alone: a continued run counts from its new start, and the time between
    its processes is left out.
    """
    records = history.training
    seconds, before = [], 0.0
    for of_process in history.processes:
        seconds += [before + (record.get("elapsed_seconds") or 0.0) for record in of_process]
        before = seconds[-1]
    places = np.linspace(0, len(records) - 1, min(len(records), CLOCK_POINTS)).round()
    chosen = np.unique(places).astype(int).tolist()
    return {
        "iterations": [records[place]["iteration"] for place in chosen],
        "tokens": [records[place].get("consumed_tokens") or 0 for place in chosen],
        "hours": shorts(seconds[place] / 3600 for place in chosen),
    }


def routing_of(history: RunHistory) -> dict[str, Any] | None:
    """The loads, entropies and norms of the layers over the run and at its end; None if none."""
    routing = history.routing
    if routing is None:
        return None
    iterations_R, shape_GE = routing.iterations_R, (len(routing.layers), routing.num_experts)
    moments = max(1, min(MOST_MOMENTS, MAP_VALUES // (shape_GE[0] * shape_GE[1])))

    def ends(parts: list[slice]) -> list[int]:
        return [int(iterations_R[part.stop - 1]) for part in parts]

    parts = slices_of(len(iterations_R), moments)
    parts_of_layers = slices_of(
        len(iterations_R), min(CLOCK_POINTS, max(2, LAYER_VALUES // shape_GE[0]))
    )
    by_layer = {
        "ent_load": routing.ent_load_RG,
        "ent_conf": routing.ent_conf_RG,
        **routing.other_RG,
    }
    choices_G = np.maximum(routing.tokens_per_expert_RGE.sum(axis=(0, 2)), 1)
    found: dict[str, Any] = {
        "layers": routing.layers,
        "experts": routing.num_experts,
        "iterations": ends(parts),
        "load": as_bytes(bucket_means(routing.relative_load_RGE(), parts), TOP_LOAD),
        "end": shorts(routing.final_relative_load_GE()),
        "end_from": int(iterations_R[-last_tenth(len(iterations_R))]),
        "dropped": shorts(routing.tokens_dropped_RG.sum(axis=0) / choices_G),
        "by_layer": {
            "iterations": ends(parts_of_layers),
            **{
                name: shorts(bucket_means(values_RG, parts_of_layers))
                for name, values_RG in by_layer.items()
            },
        },
    }
    norms = history.norms_RGE()
    if norms is not None and norms[1].shape[1:] == shape_GE:
        tokens_R, norms_RGE = norms
        parts = slices_of(len(tokens_R), moments)
        means = bucket_means(norms_RGE, parts)
        found["norms"] = as_bytes(means, float(np.nanmax(means)))
        found["norms"]["tokens"] = [int(tokens_R[part.stop - 1]) for part in parts]
    return found
