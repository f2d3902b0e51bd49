"""A metrics record as flat names and numbers, for the services that draw curves."""

from __future__ import annotations

import math
from typing import Any

from moe_parallel.telemetry.metrics import Record
from moe_parallel.telemetry.statistics import LOSSES, load_shares

#: What a layer may tell in one number.
MEASURES = (
    "ent_load",
    "ent_conf",
    "max_minus_min_load",
    "tokens_dropped",
    "experts_per_token",
    "utilisation",
    "wire_bytes_per_token",
    *LOSSES,
)


def scalars(record: Record) -> dict[str, float]:
    """The finite numbers of a record by name, grouped by what stands before the first slash.

    train/lm_loss, validation/code/bits_per_byte, ent_load/layer_03, load/layer_03/expert_05
    (share of choices), norm/layer_03/expert_05; and over all layers routing/ent_load and
    routing/ent_conf (means), routing/max_minus_min_load and routing/tokens_dropped (sums).
    """
    named: dict[str, Any] = {}
    for key, value in record.items():
        if key not in ("iteration", "layers", "validation"):
            named[f"train/{key}"] = value
    for domain, measures in record.get("validation", {}).items():
        for measure, value in measures.items():
            named[f"validation/{domain}/{measure}"] = value
    layers = record.get("layers", [])
    for layer in layers:
        named.update(_layer_scalars(layer))
    if layers:
        named.update(_totals(layers))
    return {
        name: float(value)
        for name, value in named.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _layer_scalars(layer: dict[str, Any]) -> dict[str, Any]:
    place = f"layer_{layer['layer']:02d}"
    named = {f"{measure}/{place}": layer[measure] for measure in MEASURES if measure in layer}
    for expert, share in enumerate(load_shares(layer["tokens_per_expert"])):
        named[f"load/{place}/expert_{expert:02d}"] = share
    for expert, norm in enumerate(layer.get("norm_per_expert", [])):
        named[f"norm/{place}/expert_{expert:02d}"] = norm
    for expert, weight in enumerate(layer.get("routing_weight_per_expert", [])):
        named[f"routing_weight/{place}/expert_{expert:02d}"] = weight
    return named


def _totals(layers: list[dict[str, Any]]) -> dict[str, float]:
    def total(measure: str) -> float:
        return sum(layer[measure] for layer in layers)

    return {
        "routing/ent_load": total("ent_load") / len(layers),
        "routing/ent_conf": total("ent_conf") / len(layers),
        "routing/max_minus_min_load": total("max_minus_min_load"),
        "routing/tokens_dropped": total("tokens_dropped"),
    }
