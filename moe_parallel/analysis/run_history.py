"""A run as arrays over its iterations, from the records of metrics.jsonl.

Shape suffixes: R records that have what the array holds, G routed layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_parallel.telemetry.metrics import Record


@dataclass(frozen=True)
class Curve:
    """Values at iterations, in order; a number that was not finite is NaN."""

    iterations_R: np.ndarray
    values_R: np.ndarray


@dataclass(frozen=True)
class RoutingHistory:
    """What the routed layers did; entropies in nats."""

    layers: list[int]
    iterations_R: np.ndarray
    tokens_per_expert_RGE: np.ndarray
    tokens_dropped_RG: np.ndarray
    ent_load_RG: np.ndarray
    ent_conf_RG: np.ndarray
    has_norms: bool

    @property
    def num_experts(self) -> int:
        return self.tokens_per_expert_RGE.shape[-1]

    def relative_load_RGE(self) -> np.ndarray:
        """Load of each expert over the load of an even split: 1 everywhere is perfect balance."""
        return _relative(self.tokens_per_expert_RGE)

    def final_records(self) -> int:
        """How many records are "the end": the last tenth, at least one."""
        return max(1, len(self.iterations_R) // 10)

    def final_relative_load_GE(self) -> np.ndarray:
        """`relative_load_RGE` of all the choices made at the end."""
        return _relative(self.tokens_per_expert_RGE[-self.final_records() :].sum(axis=0))

    def dropped_share(self) -> float:
        """Of all choices of the run, those over capacity."""
        return float(self.tokens_dropped_RG.sum() / max(1, self.tokens_per_expert_RGE.sum()))


@dataclass(frozen=True)
class RunHistory:
    """The curves of a run.

    `start`: where its first measurement began. `validation` (nats a token) and `bits_per_byte` are
    by domain. `routing` is None where no layer is routed.
    """

    start: int
    last_iteration: int
    consumed_tokens: int | None
    train_loss: Curve
    validation: dict[str, Curve]
    bits_per_byte: dict[str, Curve]
    routing: RoutingHistory | None

    @classmethod
    def from_records(cls, records: Sequence[Record]) -> RunHistory:
        """`records`: at least one, in any order. Of records with the same iteration (a run resumed
        without cutting its file) the later wins, field by field."""
        merged: dict[int, Record] = {}
        for record in records:
            iteration = record["iteration"]
            merged[iteration] = {**merged.get(iteration, {}), **record}
        ordered = [merged[iteration] for iteration in sorted(merged)]
        consumed = [r["consumed_tokens"] for r in ordered if r.get("consumed_tokens")]
        return cls(
            start=interval_start([record["iteration"] for record in ordered]),
            last_iteration=ordered[-1]["iteration"],
            consumed_tokens=consumed[-1] if consumed else None,
            train_loss=_curve([(r["iteration"], r["lm_loss"]) for r in ordered if "lm_loss" in r]),
            validation=_by_domain(ordered, "loss"),
            bits_per_byte=_by_domain(ordered, "bits_per_byte"),
            routing=_routing(ordered),
        )


def interval_start(iterations: list[int]) -> int:
    """Where the first of these intervals began, if it was as long as the second; at least 0."""
    if len(iterations) == 1:
        return 0
    return max(0, 2 * iterations[0] - iterations[1])


def _relative(tokens_per_expert: np.ndarray) -> np.ndarray:
    mean = tokens_per_expert.mean(axis=-1, keepdims=True)
    return tokens_per_expert / np.where(mean > 0, mean, 1)


def _curve(points: list[tuple[int, float | None]]) -> Curve:
    iterations = np.array([iteration for iteration, _ in points], dtype=np.int64)
    return Curve(iterations, np.array([value for _, value in points], dtype=np.float64))


def _by_domain(records: list[Record], measure: str) -> dict[str, Curve]:
    points: dict[str, list[tuple[int, float | None]]] = {}
    for record in records:
        for domain, measures in record.get("validation", {}).items():
            if measure in measures:
                points.setdefault(domain, []).append((record["iteration"], measures[measure]))
    return {domain: _curve(of_domain) for domain, of_domain in points.items()}


def _routing(records: list[Record]) -> RoutingHistory | None:
    """Of the records with the layers that the last one has."""
    routed = [record for record in records if record.get("layers")]
    if not routed:
        return None
    layers = [layer["layer"] for layer in routed[-1]["layers"]]
    routed = [r for r in routed if [layer["layer"] for layer in r["layers"]] == layers]

    def array(key: str) -> Any:
        return np.array([[layer[key] for layer in r["layers"]] for r in routed], dtype=np.float64)

    return RoutingHistory(
        layers=layers,
        iterations_R=np.array([r["iteration"] for r in routed], dtype=np.int64),
        tokens_per_expert_RGE=array("tokens_per_expert"),
        tokens_dropped_RG=array("tokens_dropped"),
        ent_load_RG=array("ent_load"),
        ent_conf_RG=array("ent_conf"),
        has_norms="norm_per_expert" in routed[-1]["layers"][0],
    )
