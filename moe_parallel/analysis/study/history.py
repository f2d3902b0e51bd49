"""What one run of a study measured, as arrays. A measure that a system does not have is None.

Shape suffixes: R logged iterations, G layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_parallel.telemetry.metrics import Record

Layers = list[dict[str, Any]]


@dataclass(frozen=True)
class CellHistory:
    """The logged iterations and the evaluations of a run, ascending, each iteration once."""

    training: list[Record]
    evaluations: list[Record]

    @classmethod
    def from_records(cls, records: Sequence[Record]) -> CellHistory:
        """`records`: those of a metrics.jsonl. Of two for one iteration the later wins."""
        training = {r["iteration"]: r for r in records if "lm_loss" in r}
        evaluations = {r["iteration"]: r for r in records if "validation" in r}
        return cls(
            [training[iteration] for iteration in sorted(training)],
            [evaluations[iteration] for iteration in sorted(evaluations)],
        )

    @property
    def final(self) -> dict[str, dict[str, Any]]:
        """The last evaluation, by domain."""
        return self.evaluations[-1]["validation"] if self.evaluations else {}

    @property
    def end(self) -> list[Record]:
        """The last tenth of the logged iterations, at least one: what "at the end" means."""
        return self.training[-max(1, len(self.training) // 10) :] if self.training else []

    def losses(self, domain: str | None) -> tuple[np.ndarray, np.ndarray]:
        """(tokens read, nats a token) over the run: of training, or of a held-out domain."""
        if domain is None:
            points = [(r["consumed_tokens"], r["lm_loss"]) for r in self.training]
        else:
            points = [
                (r["consumed_tokens"], r["validation"][domain]["loss"])
                for r in self.evaluations
                if domain in r["validation"]
            ]
        tokens_R = np.array([tokens for tokens, _ in points], dtype=np.int64)
        return tokens_R, np.array([loss for _, loss in points], dtype=np.float64)

    def norms_RGE(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(tokens read [R], norms [R, G, E]) of the experts over training."""
        records = [
            r for r in self.training if per_layer(r["layers"], "norm_per_expert") is not None
        ]
        if not records:
            return None
        tokens_R = np.array([r["consumed_tokens"] for r in records], dtype=np.int64)
        return tokens_R, np.array([per_layer(r["layers"], "norm_per_expert") for r in records])

    def load_at_the_end_GE(self) -> np.ndarray | None:
        """Load of each expert over that of an even split, over all choices at the end."""
        counts = [per_layer(record["layers"], "tokens_per_expert") for record in self.end]
        found = [count for count in counts if count is not None]
        if not found:
            return None
        total_GE = np.sum(found, axis=0)
        mean_G1 = total_GE.mean(axis=1, keepdims=True)
        return total_GE / np.where(mean_G1 > 0, mean_G1, 1)

    def held_out(self, measure: str) -> dict[str, np.ndarray]:
        """A measure of the last evaluation's layers, by domain: [G] or [G, E]; {} without it."""
        found = {name: per_layer(of.get("layers"), measure) for name, of in self.final.items()}
        return {name: values for name, values in found.items() if values is not None}


def per_layer(layers: Layers | None, measure: str) -> np.ndarray | None:
    """`measure` of every layer that has experts; None where there is none, or it is not told."""
    if not layers or any(measure not in layer for layer in layers):
        return None
    return np.array([layer[measure] for layer in layers], dtype=np.float64)


def layer_numbers(layers: Layers | None) -> list[int]:
    """Counted from 1."""
    return [int(layer["layer"]) for layer in layers or []]
