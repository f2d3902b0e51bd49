"""The record of a system of expert selection, from which every layer of experts is built."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import nn

from moe_parallel.balancing.bias import ExpertBias, balancing_bias
from moe_parallel.balancing.controller import Controller
from moe_parallel.balancing.losses import MakeLoss, losses_of
from moe_parallel.config import Selection
from moe_parallel.layers.expert_layer import ExpertLayer, LayerConfig, LayerContext

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


#: (options of a system, configuration of the model, iterations of the run). The iterations are None
#: if no run trains the layer. The result is None if these options have neither bias nor cutoffs.
MakeBias = Callable[[Any, LayerConfig, int | None], ExpertBias | None]

#: (options of a system, number of experts, iterations of the run). The iterations are None if no
#: run trains the layer. The result is None if and only if `Selection.controlled` is.
MakeController = Callable[[Any, int, int | None], Controller | None]


def uncontrolled(selection: Selection, num_experts: int, train_iters: int | None) -> None:
    """No controller."""


def no_table(context: LayerContext) -> None:
    """The ids of the tokens choose no experts."""


@dataclass(frozen=True)
class System:
    """A system of expert selection: everything that is built from its options.

    Each function takes the options, an instance of `selection`.
    """

    selection: type[Selection]  # the class of the options, with the name for --expert-selection
    layer: type[ExpertLayer]  # or the variant of it that the options ask for
    rules: Callable[[Any], Rules]
    own_losses: tuple[MakeLoss, ...] = ()  # besides those of the options that systems share
    bias: MakeBias = balancing_bias  # the balancing bias, if the options have one, or cutoffs
    controller: MakeController = uncontrolled  # of a number that all layers share
    # The reason why upcycled experts do not reproduce the dense layer's output. None: they do.
    upcycling: Callable[[Any], str | None] = scales_output
    table: Callable[[LayerContext], nn.Module | None] = no_table  # of experts by token id

    @property
    def losses(self) -> tuple[MakeLoss, ...]:
        """The auxiliary losses; a layer skips those with coefficient 0."""
        return (*losses_of(self.selection), *self.own_losses)

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


_SYSTEMS: dict[type[Selection], System] = {}


def register(system: System) -> System:
    """Register `system` for its class of options.

    Raises ValueError if the class already has a record, if it has no word for --expert-selection,
    or if it derives from a system with cutoffs and its record makes none.
    """
    kind = system.selection
    if kind in _SYSTEMS:
        raise ValueError(f"{kind.__name__} has a record already")
    if "system" not in vars(kind):
        raise ValueError(
            f"{kind.__name__} has no word of its own for --expert-selection: give its class one, "
            'system="word"'
        )
    bases = (_SYSTEMS[base] for base in kind.__mro__ if base in _SYSTEMS)
    makes = next((base.bias for base in bases if base.bias is not balancing_bias), None)
    if makes is not None and system.bias is balancing_bias:
        raise ValueError(
            f"{kind.__name__} has the options of cutoffs, but its record makes none: add "
            f"bias={getattr(makes, '__name__', makes)} of {makes.__module__}"
        )
    _SYSTEMS[kind] = system
    return system


def system_of(selection: Selection) -> System:
    """The record for some options. It stands beside their class, or in the module `rule` there.

    Raises ValueError if there is none.
    """
    kind = type(selection)
    room = f"{kind.__module__}.rule"
    is_package = hasattr(sys.modules[kind.__module__], "__path__")
    if kind not in _SYSTEMS and is_package and find_spec(room) is not None:
        import_module(room)
    if kind not in _SYSTEMS:
        raise ValueError(
            f"{kind.__name__} has no record: register a System for it ({__name__}.register)"
        )
    return _SYSTEMS[kind]
