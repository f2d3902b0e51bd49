"""Records the routing of the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from moe_parallel.library.layers import MixtureOfExperts
from moe_parallel.telemetry.statistics import RoutingTotals


class Routing:
    """The routing statistics of each layer, summed over its forward passes, by the layer's name."""

    def __init__(self, totals: Mapping[str, RoutingTotals]) -> None:
        self._totals = totals

    def summaries(self) -> dict[str, dict[str, Any]]:
        """The statistics of each layer that received a token: {name: {quantity: value}}.

        The quantities are those of metrics.jsonl: tokens_per_expert (choices, before dropping),
        experts_per_token, tokens_dropped (choices), ent_load and ent_conf (entropies of the load
        and of a token's scores, in nats), max_minus_min_load (share of choices), the auxiliary
        losses by name (means over forward passes, without their coefficients), and for AoE
        norm_per_expert. Waits for the GPU.
        """
        found = {}
        for name, totals in self._totals.items():
            for summary in totals.summaries():
                found[name] = {key: value for key, value in summary.items() if key != "layer"}
        return found

    def clear(self) -> None:
        """Reset all sums to zero."""
        for totals in self._totals.values():
            totals.clear()


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """Count the forward passes of `model` inside the context, in training and in evaluation.

    A forward pass that activation checkpointing repeats is counted each time. If two such contexts
    are nested, only the inner one counts.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MixtureOfExperts)}
    before = {name: layer.statistics.totals for name, layer in layers.items()}
    totals = {
        name: RoutingTotals.zeros(1, layer.num_experts, next(layer.parameters()).device)
        for name, layer in layers.items()
    }
    for name, layer in layers.items():
        layer.statistics.totals = totals[name]
    try:
        yield Routing(totals)
    finally:
        for name, layer in layers.items():
            layer.statistics.totals = before[name]
