"""The record of a system of expert selection, from which every layer of experts is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_parallel.balancing.controller import Controller
from moe_parallel.config import Selection
from moe_parallel.layers.bias import MakeBias, no_bias
from moe_parallel.layers.expert_layer import ExpertLayer, LayerConfig, LayerContext
from moe_parallel.layers.routing_losses import MakeLoss

SCALED_OUTPUT = (
    "the probs of a token do not sum to 1, so the feed-forward layers' outputs are scaled"
)
FREE_OUTPUT = "free experts take a part of the probs, and their output is not the dense layer's"


class Rules(NamedTuple):
    """The rules from scores to choices. The layer determines the type of the rules."""

    training: Any
    evaluation: Any


def scales_output(selection: Selection) -> str | None:
    """The note on upcycling for probs that do not sum to 1."""
    return SCALED_OUTPUT


def keeps_output(selection: Selection) -> str | None:
    """The note on upcycling for probs that sum to 1: there is none."""
    return None


#: (options of a system, number of experts, iterations of the run). The iterations are None if no
#: run trains the layer. The result is None if and only if `Selection.controlled` is.
MakeController = Callable[[Any, int, int | None], Controller | None]


def uncontrolled(selection: Selection, num_experts: int, train_iters: int | None) -> None:
    """No controller."""


@dataclass(frozen=True)
class System:
    """A system of expert selection: everything that is built from its options.

    Each function takes the options, an instance of `selection`.
    """

    selection: type[Selection]  # the class of the options, with the name for --expert-selection
    layer: type[ExpertLayer]  # or the variant of it that the options ask for
    rules: Callable[[Any], Rules]
    losses: tuple[MakeLoss, ...] = ()  # auxiliary losses; a layer skips those with coefficient 0
    bias: MakeBias = no_bias  # the balancing bias or the cutoffs
    controller: MakeController = uncontrolled  # of a number that all layers share
    # The reason why upcycled experts do not reproduce the dense layer's output. None: they do.
    upcycling: Callable[[Any], str | None] = scales_output

    def arguments(
        self, selection: Selection, expert_width: int, context: LayerContext
    ) -> dict[str, Any]:
        """The arguments of the layer besides Megatron-Core's configuration."""
        return {
            "selection": selection,
            "expert_width": expert_width,
            "context": context,
            "system": self,
        }

    def build(
        self,
        config: LayerConfig,
        selection: Selection,
        expert_width: int,
        context: LayerContext,
    ) -> ExpertLayer:
        """One layer of this system."""
        layer = self.layer.variant(selection)
        return layer(config, **self.arguments(selection, expert_width, context))
