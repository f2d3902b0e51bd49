"""Our own architecture in transformers (`moe_parallel.hf`): its config.json and its tensors.

`moe_parallel.hf` knows the rules topk, top_p, threshold, relu, hash and merge, and some classes of
layers (`System.layer`). A rule or a layer of another class is refused, because a subclass may
compute something else. `register_rule` and `register_layer` add one that equals a known one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from moe_parallel.config import Config, Selection, TopKChoices
from moe_parallel.errors import InputError
from moe_parallel.huggingface.families import rope_fields
from moe_parallel.huggingface.tensors import (
    LayerSource,
    Step,
    attention_places,
    autonomous_steps,
    dense_places,
    dispatched_width,
    embedding_places,
    folded_width,
    has_bias,
    head_places,
    low_rank_size,
    merged_steps,
    plain_steps,
    routed_steps,
    routing_free_steps,
    routing_neurons,
    union_steps,
)
from moe_parallel.layers import AutonomousLayer, RoutedLayer
from moe_parallel.layers.expert_layer import ExpertLayer
from moe_parallel.layers.system import system_of
from moe_parallel.selection import rules
from moe_parallel.selection.rules import WithoutZeroExperts
from moe_parallel.selection.segments import BySegment, by_first, by_previous
from moe_parallel.selection.topk import TopK
from moe_parallel.systems import LoryPrefixSelection
from moe_parallel.systems.lory.rule import LoryLayer
from moe_parallel.systems.relu.rule import ReLU
from moe_parallel.systems.routing_free.rule import RoutingFreeLayer
from moe_parallel.systems.smear.rule import ExpertDropout
from moe_parallel.systems.threshold.rule import Threshold
from moe_parallel.systems.top_p.rule import MovingTopP, TopP
from moe_parallel.systems.uoe.rule import UnionLayer

#: From a rule, and the number of scores that it sees, to its fields.
RuleFields = Callable[[Any, int], dict[str, Any]]

#: From what gives the probs of chosen experts to scoring_func and norm_topk_prob; and for
#: a threshold to scoring_func.
_PROBS = {probs: names for names, probs in rules.PROBS.items()}
_PROBS_OF_VALUES = {gate: name for name, gate in rules.GATES.items()}


def rule_fields(selection: Selection, num_scores: int) -> dict[str, Any]:
    """The fields of the rule that the system uses in evaluation.

    Raises InputError for a rule without an exported form.
    """
    rule = system_of(selection).rules(selection).evaluation
    if selection.forced_routing is not None:
        raise InputError(
            f"--load: its experts are forced ({selection.forced_routing}), so it is a benchmark "
            "and not a model to export"
        )
    kind = rule if isinstance(rule, FunctionType) else type(rule)
    fields_of = _RULES.get(kind)
    if fields_of is None:
        reason = _WHY_NOT.get(kind, f"its rule, {kind.__name__}, has no exported form")
        raise InputError(without_form(selection, reason))
    try:
        fields = fields_of(rule, num_scores)
    except KeyError as unknown:
        reason = f"its rule weights experts by {unknown.args[0]!r}, which has no exported form"
        raise InputError(without_form(selection, reason)) from None
    if selection.reads_token_ids:
        fields["rule"] = "hash"  # a table chooses, and the rule weights
    return fields


def without_form(selection: Selection, reason: str) -> str:
    """The message of an error for a system without an exported form."""
    return (
        f"--load: --expert-selection {selection.system} has no form in transformers, which export, "
        f"texts and tasks need: {reason}"
    )


def register_rule(kind: Any, fields_of: RuleFields) -> None:
    """Let rules of the class `kind`, or the function `kind`, be exported.

    Raises ValueError for one that is known.
    """
    if kind in _RULES or kind in _WHY_NOT:
        raise ValueError(f"{kind.__name__} is already registered for exports")
    _RULES[kind] = fields_of


def _topk(rule: TopK, num_scores: int) -> dict[str, Any]:
    probs = rule.probs.probs if isinstance(rule.probs, WithoutZeroExperts) else rule.probs
    scoring, normalized = _PROBS[probs]
    fields = {
        "rule": "topk",
        "num_experts_per_tok": rule.k,
        "scoring_func": scoring,
        "norm_topk_prob": normalized,
    }
    if rule.groups is not None:
        fields |= {"n_group": rule.groups.num_groups, "topk_group": rule.groups.topk}
    return fields


def _top_p(rule: TopP, num_scores: int) -> dict[str, Any]:
    return {
        "rule": "top_p",
        "num_experts_per_tok": rule.most or num_scores,
        "norm_topk_prob": rule.renormalizes,
        "moe_top_p": rule.p,
        "moe_top_p_strict": rule.strict,
    }


def _threshold(rule: Threshold, num_scores: int) -> dict[str, Any]:
    return {
        "rule": "threshold",
        "num_experts_per_tok": num_scores,
        "norm_topk_prob": False,
        "scoring_func": _PROBS_OF_VALUES[rule.gate],
    }


def _relu(rule: ReLU, num_scores: int) -> dict[str, Any]:
    return {"rule": "relu", "num_experts_per_tok": num_scores, "norm_topk_prob": False}


def _merge(rule: Any, num_scores: int) -> dict[str, Any]:
    return {"rule": "merge"}


_RULES: dict[Any, RuleFields] = {
    TopK: _topk,
    TopP: _top_p,
    Threshold: _threshold,
    ReLU: _relu,
    by_previous: _merge,
    by_first: _merge,
}
_WHY_NOT: dict[Any, str] = {
    ExpertDropout: "each token needs the mean of its whole sequence, which a text that is being "
    "generated does not have yet",
    MovingTopP: "its p is that of the latest step, which no configuration has; take it from "
    "metrics.jsonl and set --moe-inference-top-p",
    BySegment: "experts are chosen for whole segments, and a generated text has no segments",
}


@dataclass(frozen=True)
class ExportedLayer:
    """How a layer of experts is exported."""

    fields: Callable[[Config], dict[str, Any]]  # of config.json, besides those of the rule
    steps: Callable[[LayerSource], list[Step]]  # the tensors


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
        if isinstance(selection, TopKChoices):
            fields["zero_expert_gate"] = selection.moe_zero_expert_gate
    return fields


def _routed(config: Config) -> dict[str, Any]:
    selection: Any = config.selection
    return dispatched_fields(config) | {"router_hidden_size": selection.moe_router_hidden_size}


def _autonomous(config: Config) -> dict[str, Any]:
    return dispatched_fields(config) | {"scores": "norms"}


def _routing_free(config: Config) -> dict[str, Any]:
    selection: Any = config.selection
    theta = selection.theta(config.model.hidden_size, config.model.init_method_std)
    return _autonomous(config) | {"threshold": theta, "expert_bias": True}


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
    uniform = selection.lory_first_segment == "uniform"
    if isinstance(selection, LoryPrefixSelection):
        if uniform:
            raise InputError(
                "--lory-first-segment is uniform, which an export of lory_prefix lacks: one mean "
                "merges the experts for the first segment and for all later ones; export a run "
                "with own"
            )
        return {"prefix_length": selection.lory_segment_length}
    if selection.lory_inference == "prompt":
        return {}
    return {"segment_length": selection.lory_segment_length, "uniform_first_segment": uniform}


_LAYERS: dict[type[ExpertLayer], ExportedLayer] = {
    RoutedLayer: ExportedLayer(_routed, routed_steps),
    AutonomousLayer: ExportedLayer(_autonomous, autonomous_steps),
    RoutingFreeLayer: ExportedLayer(_routing_free, routing_free_steps),
    UnionLayer: ExportedLayer(_union, union_steps),
    LoryLayer: ExportedLayer(_merged, merged_steps),
}


MODEL_TYPE = "moe_parallel"
ARCHITECTURE = "MoeParallelForCausalLM"
_HF = Path(__file__).parents[1] / "hf"
#: The files that are copied next to the weights, by their names there.
CODE = {path.name: path for path in _HF.glob("*_moe_parallel.py")}
CODE |= {"rules_moe_parallel.py": Path(rules.__file__)}
_MODELING = "modeling_moe_parallel"
AUTO_MAP = {
    "AutoConfig": "configuration_moe_parallel.MoeParallelConfig",
    "AutoModel": f"{_MODELING}.MoeParallelModel",
    "AutoModelForCausalLM": f"{_MODELING}.{ARCHITECTURE}",
}


def own_config_json(config: Config, vocab_size: int, *, fold: bool) -> dict[str, Any]:
    """The config.json (MoeParallelConfig) of a model of `config`, with the rule of evaluations.

    Args:
        vocab_size: of the tensors that are written, without our padding.
        fold: W_g = W_down W_up is multiplied out.

    Raises InputError for a system that has no exported form.
    """
    model, qk_norm = config.model, None
    if model.qk_layernorm:
        qk_norm = "all" if model.qk_layernorm_all_heads else "head"
    fields: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "auto_map": AUTO_MAP,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_width,
        "attention_bias": model.add_qkv_bias,
        "qk_norm": qk_norm,
        "max_position_embeddings": config.positions,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": rope_fields(model)["rope_parameters"],
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "moe_layers": list(config.moe_layers),
    }
    if config.moe.num_experts is None:
        return fields
    selection, n = config.selection, config.num_experts
    width = folded_width(config) if fold else dispatched_width(config)
    fields |= {"num_experts": n, "moe_intermediate_size": width}
    fields |= rule_fields(selection, n + selection.free_experts)
    fields |= {"expert_bias": has_bias(selection)} | exported_layer(config).fields(config)
    if low_rank_size(selection) is not None:
        fields |= {"low_rank_size": low_rank_size(selection), "folded": fold}
    return fields


def own_steps(config: Config, vocab_size: int, *, fold: bool) -> list[Step]:
    """The steps of our own architecture, layer by layer. `fold`: multiply W_down W_up out."""
    steps = plain_steps(embedding_places(config, vocab_size))
    for layer, is_moe in enumerate(config.moe_layers):
        steps += plain_steps(attention_places(config.model, layer))
        if is_moe:
            steps += exported_layer(config).steps(LayerSource(config, layer, vocab_size, fold))
        else:
            steps += plain_steps(dense_places(config, layer))
    return steps + plain_steps(head_places(config, vocab_size))
