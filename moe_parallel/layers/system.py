"""What a system of expert selection is: the record that every layer of experts is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.config import Selection
from moe_parallel.layers.expert_layer import ExpertLayer, LayerContext
from moe_parallel.layers.routing_losses import MakeLoss

SCALED_OUTPUT = (
    "the probs of a token do not sum to 1, so the feed-forward layers' outputs are scaled"
)


class Rules(NamedTuple):
    """How scores become a decision. Layers say which type of rule they take."""

    training: Any
    evaluation: Any


def scales_output(selection: Selection) -> str | None:
    """The note on upcycling for probs that do not sum to 1."""
    return SCALED_OUTPUT


def keeps_output(selection: Selection) -> str | None:
    """The note on upcycling for probs that sum to 1: there is none."""
    return None


@dataclass(frozen=True)
class System:
    """Who decides which expert computes: everything that is built from the options of one system.

    Each function takes the options, an instance of `selection`.
    """

    selection: type[Selection]  # its options; they have its word for --expert-selection
    layer: Callable[[Any], type[ExpertLayer]]
    rules: Callable[[Any], Rules]
    losses: tuple[MakeLoss, ...] = ()  # on routing; those of weight 0 are left out
    # Why experts that start as one dense layer compute something else than it; None: they do not.
    upcycling: Callable[[Any], str | None] = scales_output

    def build(
        self,
        config: TransformerConfig,
        selection: Selection,
        expert_width: int,
        context: LayerContext,
    ) -> ExpertLayer:
        """One layer of this system."""
        layer: Any = self.layer(selection)
        built: ExpertLayer = layer(config, selection, expert_width, context, self)
        return built
