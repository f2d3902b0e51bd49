"""The curves of a run: losses, speed, and the routing as means over layers.

A curve is {x, y}: iterations and values, thinned. The page converts iterations to tokens and hours
by the run's clock.

Shape suffixes: R records, G layers with experts, E experts, B buckets of records.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from moe_parallel.analysis.report.numbers import as_bytes, shorts
from moe_parallel.analysis.report.thinning import bucket_means, slices_of, thinned
from moe_parallel.analysis.run_history import RoutingHistory, RunHistory, last_tenth
from moe_parallel.telemetry.metrics import MetricsLine, loss_names

CLOCK_POINTS = 200
#: The most values of a map of a run over time, of one byte each; it limits the number of moments.
MAP_VALUES = 100_000
#: The most values of the curves of a run's layers, for each measure.
LAYER_VALUES = 6_000
MOST_MOMENTS = 60
#: The load, in multiples of an even share, that the darkest color of a map stands for.
TOP_LOAD = 4.0

Curves = dict[str, dict[str, list[Any]]]

#: Fields of a record and of its `machine` that are curves by themselves.
FIELDS = (
    "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_bytes",
    "l1_coefficient", "balance_coefficient", "top_p",
)  # fmt: skip
MACHINE = ("tflops_per_device", "mfu", "joules_per_token", "gpu_watts")


def curves_of(history: RunHistory) -> Curves:
    """The curves by name; those of held-out domains are loss/DOMAIN and bits/DOMAIN."""
    training = history.training
    found: Curves = {"train": _curve(history.train_loss.iterations_R, history.train_loss.values_R)}
    for name, by_domain in (("loss", history.validation), ("bits", history.bits_per_byte)):
        for domain, curve in by_domain.items():
            found[f"{name}/{domain}"] = _curve(curve.iterations_R, curve.values_R)
    rows = [(record["iteration"], _numbers(record)) for record in training]
    for name in dict.fromkeys(name for _, numbers in rows for name in numbers):
        points = [(iteration, numbers[name]) for iteration, numbers in rows if name in numbers]
        iterations, values = zip(*points, strict=True)
        found[name] = _curve(np.array(iterations), np.array(values, dtype=np.float64))
    if history.routing is not None:
        found |= _routing_curves(history.routing)
    return {name: curve for name, curve in found.items() if curve["x"]}


def _curve(iterations_R: np.ndarray, values_R: np.ndarray) -> dict[str, list[Any]]:
    places = thinned(values_R)
    return {"x": iterations_R[places].tolist(), "y": shorts(values_R[places])}


def _numbers(record: MetricsLine) -> dict[str, float]:
    """The single numbers of a record, by the names of their curves."""
    machine, rank_load = record.get("machine") or {}, record.get("rank_load") or {}
    # null stands for a number that was not finite, and stays visible as a gap.
    fields = {name: record[name] for name in FIELDS if name in record}
    values = {
        **{name: math.nan if value is None else value for name, value in fields.items()},
        **{name: machine.get(name) for name in MACHINE},
        **{name: _mean_of_layers(record, name) for name in (*_losses(record), "experts_per_token")},
        "rank_overload": rank_load.get("overload"),
        "experts_used": _experts_used(record),
    }
    return {name: value for name, value in values.items() if value is not None}


def _losses(record: MetricsLine) -> list[str]:
    """The names of auxiliary losses, also of systems that are not registered in this process."""
    others = (key for layer in record.get("layers", []) for key in layer if key.endswith("_loss"))
    return list(dict.fromkeys([*loss_names(), *others]))


def _mean_of_layers(record: MetricsLine, measure: str) -> float | None:
    found = [layer[measure] for layer in record.get("layers", []) if measure in layer]
    return float(np.mean(found)) if found and None not in found else None


def _experts_used(record: MetricsLine) -> float | None:
    """Merged experts, of all layers, with a weight above 2 / E. [Lory, Fig. 9]"""
    used = [
        layer["utilisation"] * len(layer["tokens_per_expert"])
        for layer in record.get("layers", [])
        if "utilisation" in layer
    ]
    return float(sum(used)) if used else None


def _routing_curves(routing: RoutingHistory) -> Curves:
    choices_RG = routing.tokens_per_expert_RGE.sum(axis=2)
    relative_RGE = routing.relative_load_RGE()
    values = {
        "ent_load": routing.ent_load_RG.mean(axis=1),
        "ent_conf": routing.ent_conf_RG.mean(axis=1),
        "imbalance": relative_RGE.max(axis=(1, 2)),
        "dropped": routing.tokens_dropped_RG.sum(axis=1) / np.maximum(choices_RG.sum(axis=1), 1),
    }
    return {name: _curve(routing.iterations_R, values_R) for name, values_R in values.items()}


def tokens_and_hours(history: RunHistory) -> dict[str, list[Any]]:
    """Tokens read and hours trained at some iterations, to convert between them.

    The hours are of training alone: a continued run counts from its new start, and the time between
    its processes is left out.
    """
    records = history.training
    places = np.unique(np.linspace(0, len(records) - 1, min(len(records), CLOCK_POINTS)).round())
    seconds, before = [], 0.0
    for of_process in history.processes:
        seconds += [before + (record.get("elapsed_seconds") or 0.0) for record in of_process]
        before = seconds[-1]
    chosen = places.astype(int).tolist() if records else []
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
    layers, experts = len(routing.layers), routing.num_experts
    moments = max(1, min(MOST_MOMENTS, MAP_VALUES // (layers * experts)))
    parts = slices_of(len(routing.iterations_R), moments)
    load_RGE = routing.relative_load_RGE()
    found = {
        "layers": routing.layers,
        "experts": experts,
        "iterations": [int(routing.iterations_R[part.stop - 1]) for part in parts],
        "load": as_bytes(bucket_means(load_RGE, parts), TOP_LOAD),
        "end": shorts(routing.final_relative_load_GE()),
        "end_from": int(routing.iterations_R[-last_tenth(len(routing.iterations_R))]),
        "dropped": shorts(
            routing.tokens_dropped_RG.sum(axis=0)
            / np.maximum(routing.tokens_per_expert_RGE.sum(axis=(0, 2)), 1)
        ),
        "by_layer": _by_layer(history, routing),
    }
    norms = history.norms_RGE()
    if norms is not None and norms[1].shape[1:] == (layers, experts):
        means = bucket_means(norms[1], slices_of(len(norms[1]), moments))
        tokens_R = norms[0]
        found["norms"] = as_bytes(means, float(np.nanmax(means))) | {
            "tokens": [int(tokens_R[p.stop - 1]) for p in slices_of(len(tokens_R), moments)]
        }
    return found


def _by_layer(history: RunHistory, routing: RoutingHistory) -> dict[str, Any]:
    """Measures of each layer over the run: {iterations, measure: rows by moment}."""
    moments = min(CLOCK_POINTS, max(2, LAYER_VALUES // len(routing.layers)))
    parts = slices_of(len(routing.iterations_R), moments)
    experts_RG = _per_layer(history, routing, "experts_per_token")
    values = {
        "ent_load": routing.ent_load_RG,
        "ent_conf": routing.ent_conf_RG,
        "experts_per_token": experts_RG,
        "utilisation": _per_layer(history, routing, "utilisation"),
    }
    return {
        "iterations": [int(routing.iterations_R[part.stop - 1]) for part in parts],
        **{
            name: shorts(bucket_means(values_RG, parts))
            for name, values_RG in values.items()
            if values_RG is not None
        },
    }


def _per_layer(history: RunHistory, routing: RoutingHistory, measure: str) -> np.ndarray | None:
    """[R, G] of the records that the routing history has; None if a record lacks the measure."""
    wanted = set(routing.iterations_R.tolist())
    rows = [
        [layer.get(measure) for layer in record["layers"]]
        for record in history.training
        if record["iteration"] in wanted
    ]
    if any(value is None for row in rows for value in row):
        return None
    return np.array(rows, dtype=np.float64)
