"""What the layers of a model choose while somebody listens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from moe_parallel.library.layers import MixtureOfExperts
from moe_parallel.telemetry.statistics import RoutingTotals


class Routing:
    """Sums over the forward passes of each layer, by the layer's name in the model."""

    def __init__(self, totals: Mapping[str, RoutingTotals]) -> None:
        self._totals = totals

    def summaries(self) -> dict[str, dict[str, Any]]:
        """What each layer that saw a token chose: {name: {quantity: value}}. Waits for a GPU.

        Quantities, as in metrics.jsonl: tokens_per_expert (choices, before dropping),
        experts_per_token, tokens_dropped (choices), ent_load and ent_conf (entropies of the load
        and of a token's scores, in nats), max_minus_min_load (share of choices), the losses on
        routing by name (means over forward passes, without their coefficients), and with AoE
        norm_per_expert.
        """
        found = {}
        for name, totals in self._totals.items():
            for summary in totals.summaries():
                found[name] = {key: value for key, value in summary.items() if key != "layer"}
        return found

    def clear(self) -> None:
        """Starts again from zero."""
        for totals in self._totals.values():
            totals.clear()


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """Forward passes of `model` inside the context are counted, in training and evaluation alike.

    A forward pass that activation checkpointing repeats is counted each time. Within another such
    context, the inner one counts alone.
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
