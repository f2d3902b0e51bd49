"""A run as arrays over its iterations, from the records of metrics.jsonl.

Shape suffixes: R records that have the array's quantity, G layers with experts, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moe_parallel.telemetry.metrics import MetricsLine

Layers = list[dict[str, Any]]


@dataclass(frozen=True)
class Curve:
    """Values by iteration, in order. A number that was not finite is NaN."""

    iterations_R: np.ndarray
    tokens_R: np.ndarray  # tokens read so far; 0 if the record does not contain them
    values_R: np.ndarray


@dataclass(frozen=True)
class RoutingHistory:
    """The routing statistics of the layers; entropies in nats."""

    layers: list[int]
    iterations_R: np.ndarray
    tokens_per_expert_RGE: np.ndarray
    tokens_dropped_RG: np.ndarray
    ent_load_RG: np.ndarray
    ent_conf_RG: np.ndarray
    other_RG: dict[str, np.ndarray]  # experts_per_token and utilisation, if all records have them
    has_norms: bool

    @property
    def num_experts(self) -> int:
        return self.tokens_per_expert_RGE.shape[-1]

    def relative_load_RGE(self) -> np.ndarray:
        """The load of each expert divided by an even load. 1 everywhere is perfect balance."""
        return relative(self.tokens_per_expert_RGE)

    def final_records(self) -> int:
        """The number of records that are "the end"."""
        return last_tenth(len(self.iterations_R))

    def final_relative_load_GE(self) -> np.ndarray:
        """`relative_load_RGE` over all choices at the end."""
        return relative(self.tokens_per_expert_RGE[-self.final_records() :].sum(axis=0))

    def dropped_share(self) -> float:
        """The share of all choices of the run that were dropped."""
        return float(self.tokens_dropped_RG.sum() / max(1, self.tokens_per_expert_RGE.sum()))


@dataclass(frozen=True)
class RunHistory:
    """The records of a run for figures and studies: each iteration once, in ascending order.

    A measure that a system does not have is None, or has no entry.
    """

    training: list[MetricsLine]  # the logged iterations
    evaluations: list[MetricsLine]
    start: int  # where the first measurement began
    last_iteration: int

    @classmethod
    def from_records(cls, records: Sequence[MetricsLine]) -> RunHistory:
        """`records`: at least one record of a metrics.jsonl, in any order. If an iteration has
        several (a run was resumed without cutting its file), the last one counts."""
        iterations = sorted({record["iteration"] for record in records})
        return cls(
            _latest(records, "lm_loss"),
            _latest(records, "validation"),
            interval_start(iterations),
            iterations[-1],
        )

    @property
    def consumed_tokens(self) -> int | None:
        """The tokens read in training by the end. None if no record contains them."""
        records = [*self.training, *self.evaluations]
        return max((r.get("consumed_tokens") or 0 for r in records), default=0) or None

    @property
    def processes(self) -> list[list[MetricsLine]]:
        """The logged iterations by the process that trained them, whose clock began at 0."""
        found: list[list[MetricsLine]] = []
        last = math.inf
        for record in self.training:
            elapsed = record.get("elapsed_seconds") or 0.0
            if elapsed < last:
                found.append([])
            found[-1].append(record)
            last = elapsed
        return found

    @property
    def train_loss(self) -> Curve:
        return _curve([(record, record["lm_loss"]) for record in self.training])

    def loss(self, domain: str | None) -> Curve:
        """The loss in training, or on a held-out domain: one point per evaluation."""
        return self.train_loss if domain is None else self.validation.get(domain, _curve([]))

    @property
    def validation(self) -> dict[str, Curve]:
        """The validation loss in nats per token, by held-out domain."""
        return self._by_domain("loss")

    @property
    def bits_per_byte(self) -> dict[str, Curve]:
        return self._by_domain("bits_per_byte")

    @cached_property
    def routing(self) -> RoutingHistory | None:
        """The routing statistics over training. None if no layer has any."""
        return _routing(self.training)

    @property
    def final(self) -> dict[str, dict[str, Any]]:
        """The last evaluation, by domain."""
        return self.evaluations[-1]["validation"] if self.evaluations else {}

    @property
    def end(self) -> list[MetricsLine]:
        """The logged iterations that are "the end"."""
        return self.training[-last_tenth(len(self.training)) :] if self.training else []

    def norms_RGE(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(tokens read [R], norms of the experts [R, G, E]) over training."""
        found = [
            (record["consumed_tokens"], norms_GE)
            for record in self.training
            if (norms_GE := per_layer(record["layers"], "norm_per_expert")) is not None
        ]
        if not found:
            return None
        tokens, norms = zip(*found, strict=True)
        return np.array(tokens, dtype=np.int64), np.array(norms)

    def held_out(self, measure: str) -> dict[str, np.ndarray]:
        """A measure of the layers in the last evaluation, by domain: [G] or [G, E]; {} if none."""
        found = {name: per_layer(of.get("layers"), measure) for name, of in self.final.items()}
        return {name: values for name, values in found.items() if values is not None}

    def _by_domain(self, measure: str) -> dict[str, Curve]:
        points: dict[str, list[tuple[MetricsLine, float | None]]] = {}
        for record in self.evaluations:
            for domain, measures in record["validation"].items():
                if measure in measures:
                    points.setdefault(domain, []).append((record, measures[measure]))
        return {domain: _curve(of_domain) for domain, of_domain in points.items()}


def per_layer(layers: Layers | None, measure: str) -> np.ndarray | None:
    """`measure` of every layer with experts. None if there is no such layer or no such measure."""
    if not layers or any(measure not in layer for layer in layers):
        return None
    return np.array([layer[measure] for layer in layers], dtype=np.float64)


def layer_numbers(layers: Layers | None) -> list[int]:
    """The numbers of the layers, counted from 1."""
    return [int(layer["layer"]) for layer in layers or []]


def last_tenth(records: int) -> int:
    """The number of records that are "the end": a tenth of `records`, at least one."""
    return max(1, records // 10)


def interval_start(iterations: list[int]) -> int:
    """The start of the first interval if it is as long as the second; at least 0."""
    if len(iterations) == 1:
        return 0
    return max(0, 2 * iterations[0] - iterations[1])


def relative(tokens_per_expert: np.ndarray) -> np.ndarray:
    """The loads [..., E] in multiples of an even one."""
    mean = tokens_per_expert.mean(axis=-1, keepdims=True)
    return tokens_per_expert / np.where(mean > 0, mean, 1)


def _latest(records: Sequence[MetricsLine], kind: str) -> list[MetricsLine]:
    """The last record of each iteration that has `kind`, in order of iteration."""
    found = {record["iteration"]: record for record in records if kind in record}
    return [found[iteration] for iteration in sorted(found)]


def _curve(points: Sequence[tuple[MetricsLine, float | None]]) -> Curve:
    return Curve(
        np.array([record["iteration"] for record, _ in points], dtype=np.int64),
        np.array([record.get("consumed_tokens") or 0 for record, _ in points], dtype=np.int64),
        np.array([value for _, value in points], dtype=np.float64),
    )


def _routing(records: list[MetricsLine]) -> RoutingHistory | None:
    """The routing history of the records that have the same layers as the last one."""
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
        other_RG={
            name: array(name)
            for name in ("experts_per_token", "utilisation")
            if all(name in layer for r in routed for layer in r["layers"])
        },
        has_norms="norm_per_expert" in routed[-1]["layers"][0],
    )
