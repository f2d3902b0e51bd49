"""A metrics record as named numbers and distributions, for the services that draw curves."""

from __future__ import annotations

import math
from typing import Any

from moe_parallel.telemetry.metrics import MetricsLine, loss_names
from moe_parallel.telemetry.statistics import load_shares

#: The single numbers that a layer may report, besides its losses.
MEASURES = (
    "ent_load",
    "ent_conf",
    "max_minus_min_load",
    "tokens_dropped",
    "experts_per_token",
    "utilisation",
    "wire_bytes_per_token",
    "output_rms",
)


#: The values that a layer reports per expert, by their names in a record: the names in charts.
PER_EXPERT = {
    "norm_per_expert": "norm",
    "cutoff_per_expert": "cutoff",
    "routing_weight_per_expert": "routing_weight",
}


def scalars(record: MetricsLine) -> dict[str, float]:
    """The finite numbers of a record by name, grouped by the part before the first slash.

    train/lm_loss, machine/mfu, validation/code/bits_per_byte, moe/layer_03/ent_load,
    moe/layer_03/imbalance (load of the busiest expert over the mean load: 1 is even); and over all
    layers moe/ent_load and moe/ent_conf (means), moe/max_minus_min_load and moe/tokens_dropped
    (sums), moe/imbalance_mean and moe/imbalance_max; and moe/rank_overload (`rank_load`).
    """
    named: dict[str, Any] = {}
    for key, value in record.items():
        if key not in ("iteration", "layers", "validation", "machine"):
            named[f"train/{key}"] = value
    named |= {f"machine/{name}": value for name, value in record.get("machine", {}).items()}
    for domain, measures in record.get("validation", {}).items():
        for measure, value in measures.items():
            named[f"validation/{domain}/{measure}"] = value
    if "rank_load" in record:
        named["moe/rank_overload"] = record["rank_load"]["overload"]
    layers = record.get("layers", [])
    for layer in layers:
        place = _place(layer)
        measures = [measure for measure in (*MEASURES, *loss_names()) if measure in layer]
        named |= {f"{place}/{measure}": layer[measure] for measure in measures}
        named[f"{place}/imbalance"] = max(_relative_load(layer))
    if layers:
        named.update(_totals(layers))
    return {
        name: float(value)
        for name, value in named.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def histograms(record: MetricsLine) -> dict[str, list[float]]:
    """One finite number per expert of a layer, by name.

    moe/layer_03/load (choices over the mean of the experts: 1 is even), and if the layer has them
    moe/layer_03/norm, moe/layer_03/cutoff and moe/layer_03/routing_weight. One chart per expert
    would be thousands of charts.
    """
    named: dict[str, list[Any]] = {}
    for layer in record.get("layers", []):
        named[f"{_place(layer)}/load"] = _relative_load(layer)
        for key, name in PER_EXPERT.items():
            if key in layer:
                named[f"{_place(layer)}/{name}"] = layer[key]
    finite = {
        name: [x for x in values if x is not None and math.isfinite(x)]
        for name, values in named.items()
    }
    return {name: values for name, values in finite.items() if values}


def _place(layer: dict[str, Any]) -> str:
    return f"moe/layer_{layer['layer']:02d}"


def _relative_load(layer: dict[str, Any]) -> list[float]:
    shares = load_shares(layer["tokens_per_expert"])
    return [share * len(shares) for share in shares]


def _totals(layers: list[dict[str, Any]]) -> dict[str, float]:
    def total(measure: str) -> float:
        return sum(layer[measure] for layer in layers)

    imbalances = [max(_relative_load(layer)) for layer in layers]
    return {
        "moe/ent_load": total("ent_load") / len(layers),
        "moe/ent_conf": total("ent_conf") / len(layers),
        "moe/max_minus_min_load": total("max_minus_min_load"),
        "moe/tokens_dropped": total("tokens_dropped"),
        "moe/imbalance_mean": sum(imbalances) / len(layers),
        "moe/imbalance_max": max(imbalances),
    }
