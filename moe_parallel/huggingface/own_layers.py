"""The layers of experts of our own architecture: what config.json and a model card say of each.

One record per class of layers (`System.layer`). A layer of another class is refused, because a
subclass may compute something else. `register_layer` adds one that equals a layer of
`moe_parallel.hf`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_parallel.config import Config
from moe_parallel.errors import InputError
from moe_parallel.huggingface import own_steps
from moe_parallel.huggingface.own_rules import without_form
from moe_parallel.huggingface.own_steps import LayerSource, routing_neurons
from moe_parallel.huggingface.steps import Step
from moe_parallel.layers import AutonomousLayer, RoutedLayer
from moe_parallel.layers.expert_layer import ExpertLayer
from moe_parallel.layers.system import system_of
from moe_parallel.systems.lory.rule import LoryLayer
from moe_parallel.systems.routing_free.rule import RoutingFreeLayer
from moe_parallel.systems.uoe.rule import UnionLayer

EARLIER_TOKENS = "A token's output depends on this token and earlier ones."
_EXPERTS_CHOSE = (
    "In training each expert chose among all tokens of a micro-batch, later ones too, so the "
    "training loss is not the likelihood of the text. Here each token chooses its experts, as in "
    "the run's evaluations, and its output depends on this token and earlier ones."
)


def depends_on_earlier_tokens(config: Config) -> str:
    """What an output depends on, where tokens choose their experts in the exported model."""
    return EARLIER_TOKENS if config.selection.experts_take is None else _EXPERTS_CHOSE


def differs_in_nothing(config: Config) -> list[str]:
    """The layer computes what the run's evaluations compute."""
    return []


@dataclass(frozen=True)
class ExportedLayer:
    """How a layer of experts is exported. Each function takes the configuration of the run."""

    fields: Callable[[Config], dict[str, Any]]  # of config.json, besides those of the rule
    steps: Callable[[LayerSource], list[Step]]  # the tensors
    depends_on: Callable[[Config], str] = depends_on_earlier_tokens  # a sentence for the card
    differs: Callable[[Config], list[str]] = differs_in_nothing  # sentences, from the run


def exported_layer(config: Config) -> ExportedLayer:
    """The record of the layers of a configuration. Raises InputError if there is none."""
    layer = system_of(config.selection).layer
    found = _LAYERS.get(layer)
    if found is None:
        reason = f"its layer, {layer.__name__}, has no exported form"
        raise InputError(without_form(config.selection, reason))
    return found


def register_layer(layer: type[ExpertLayer], exported: ExportedLayer) -> None:
    """Let layers of this class be exported. Raises ValueError for a class that is known."""
    if layer in _LAYERS:
        raise ValueError(f"{layer.__name__} is already registered for exports")
    _LAYERS[layer] = exported


def dispatched_fields(config: Config) -> dict[str, Any]:
    """The fields of a layer that dispatches tokens: its shared expert and its free experts."""
    selection, shared = config.selection, config.selection.shared_expert
    fields: dict[str, Any] = {
        "shared_expert_intermediate_size": None if shared is None else shared.width,
        "shared_expert_gate": shared is not None and shared.gate,
    }
    if selection.free_experts:
        numbers = selection.free_kinds._asdict()
        fields |= {f"{kind}_experts": number for kind, number in numbers.items()}
        gate = selection.zero_expert_gate
        fields |= {} if gate is None else {"zero_expert_gate": gate}
    return fields


def _routed(config: Config) -> dict[str, Any]:
    selection: Any = config.selection
    return dispatched_fields(config) | {"router_hidden_size": selection.moe_router_hidden_size}


def _autonomous(config: Config) -> dict[str, Any]:
    return dispatched_fields(config) | {"scores": "norms"}


def _screened(config: Config) -> list[str]:
    selection: Any = config.selection
    if not selection.screening:
        return []
    return [
        "The run compared norms in FP8 first. Here all norms are exact, so a few choices may "
        "differ from the run's."
    ]


def _routing_free(config: Config) -> dict[str, Any]:
    selection: Any = config.selection
    theta = selection.theta(config.model.hidden_size, config.model.init_method_std)
    return _autonomous(config) | {"threshold": theta}


def _union(config: Config) -> dict[str, Any]:
    selection: Any = config.selection
    return dispatched_fields(config) | {
        "scores": "neurons",
        "routing_neurons": routing_neurons(config),
        "norm_of": selection.uoe_norm_of,
        "gate_routing": selection.uoe_gate_routing,
    }


def _merged(config: Config) -> dict[str, Any]:
    selection: Any = config.selection
    prefix = selection.merging_prefix
    if prefix is None:
        if selection.lory_inference == "prompt":
            return {}
        return {
            "segment_length": selection.lory_segment_length,
            "uniform_first_segment": selection.lory_first_segment == "uniform",
        }
    if selection.lory_first_segment == "uniform":
        raise InputError(
            "--lory-first-segment is uniform, which an export of lory_prefix lacks: one mean "
            "merges the experts for the first segment and for all later ones; export a run with own"
        )
    return {"prefix_length": prefix}


def _depends_on_prompt(config: Config) -> str:
    selection: Any = config.selection
    prefix = selection.merging_prefix
    by = "prompt" if prefix is None else f"first {prefix} tokens of the prompt"
    return (
        f"The mean of the {by} merges the experts, once in each layer, for the prompt and all that "
        "is generated. In the prompt a token's output therefore depends on later tokens too. A "
        "loss over a text that is given at once is not its likelihood; use the run's own "
        "evaluation."
    )


def _merged_once(config: Config) -> list[str]:
    selection: Any = config.selection
    prefix = selection.merging_prefix
    if prefix is not None:
        return [
            f"If a prompt has fewer than {prefix} tokens, tools/generate.py merges anew for each "
            "token, as this model does without a cache (use_cache=False). With one the mean of the "
            "prompt stays, so such a text may differ."
        ]
    if selection.lory_inference == "prompt":
        return []
    return [
        "The run's evaluations merge the experts anew for each segment, as this model does without "
        "a cache (use_cache=False). With one they are merged once, as in the run's generation."
    ]


_LAYERS: dict[type[ExpertLayer], ExportedLayer] = {
    RoutedLayer: ExportedLayer(_routed, own_steps.routed_steps),
    AutonomousLayer: ExportedLayer(_autonomous, own_steps.autonomous_steps, differs=_screened),
    RoutingFreeLayer: ExportedLayer(_routing_free, own_steps.routing_free_steps),
    UnionLayer: ExportedLayer(_union, own_steps.union_steps),
    LoryLayer: ExportedLayer(_merged, own_steps.merged_steps, _depends_on_prompt, _merged_once),
}
