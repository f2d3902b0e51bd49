"""Our own architecture in transformers (`moe_parallel.hf`): its configuration, from a run's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_parallel.config import (
    AutonomousSelection,
    BiasBalancing,
    Config,
    Cutoffs,
    DispatchedSelection,
    FixedFreeExperts,
    FreeExperts,
    LoryPrefixSelection,
    RoutedSelection,
    RoutingFreeSelection,
    Selection,
    UoESelection,
)
from moe_parallel.errors import InputError
from moe_parallel.huggingface.configuration import rope_fields
from moe_parallel.selection import topk
from moe_parallel.selection.expert_dropout import ExpertDropout
from moe_parallel.selection.relu import ReLU
from moe_parallel.selection.segments import BySegment, by_first, by_previous
from moe_parallel.selection.threshold import Threshold
from moe_parallel.selection.top_p import MovingTopP, TopP
from moe_parallel.selection.topk import TopK, WithoutZeroExperts
from moe_parallel.systems import system_of

MODEL_TYPE = "moe_parallel"
ARCHITECTURE = "MoeParallelForCausalLM"
CODE = "*_moe_parallel.py"  # the files of moe_parallel/hf that are copied beside the weights
_MODELING = "modeling_moe_parallel"
AUTO_MAP = {
    "AutoConfig": "configuration_moe_parallel.MoeParallelConfig",
    "AutoModel": f"{_MODELING}.MoeParallelModel",
    "AutoModelForCausalLM": f"{_MODELING}.{ARCHITECTURE}",
}

_TILE = 16  # Eq. 5 of AoE gives any width, and kernels want rows of a multiple of 16 bytes or more

#: From the function that gives the probs of chosen experts: scoring_func and norm_topk_prob.
_PROBS: dict[Any, tuple[str, bool]] = {
    topk.softmax_of_selected: ("softmax", True),
    topk.raw_probability: ("softmax", False),
    topk.raw_score: ("raw", False),
    topk.sigmoid_share_of_selected: ("sigmoid", True),
    topk.sigmoid_of_selected: ("sigmoid", False),
}


def own_config_json(config: Config, vocab_size: int, *, fold: bool) -> dict[str, Any]:
    """The config.json (MoeParallelConfig) of a model of `config`, with the rule of evaluations.

    Args:
        vocab_size: of the tensors that are written, without our padding.
        fold: W_g = W_down W_up is multiplied out.

    Raises InputError for a system that has no exported form.
    """
    model = config.model
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
        "qk_norm": _qk_norm(model.qk_layernorm, model.qk_layernorm_all_heads),
        "max_position_embeddings": config.training.seq_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": rope_fields(model)["rope_parameters"],
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "moe_layers": list(config.moe_layers),
    }
    if config.moe.num_experts is None:
        return fields
    selection, n = config.selection, config.moe.num_experts
    width = folded_width(config) if fold else dispatched_width(config)
    fields |= {"num_experts": n, "moe_intermediate_size": width}
    fields |= _rule_fields(selection, n)
    fields |= _free_fields(selection)
    if low_rank_size(selection) is not None:
        fields |= {"low_rank_size": low_rank_size(selection), "folded": fold}
    if isinstance(selection, AutonomousSelection):
        fields["scores"] = "norms"
    if isinstance(selection, UoESelection):
        fields |= {
            "scores": "neurons",
            "routing_neurons": routing_neurons(config),
            "norm_of": selection.uoe_norm_of,
            "gate_routing": selection.uoe_gate_routing,
        }
    if isinstance(selection, RoutedSelection):
        fields["router_hidden_size"] = selection.moe_router_hidden_size
    fields["expert_bias"] = has_bias(selection)
    if isinstance(selection, DispatchedSelection):
        fields["shared_expert_intermediate_size"] = selection.moe_shared_expert_intermediate_size
        fields["shared_expert_gate"] = selection.moe_shared_expert_gate
    if isinstance(selection, RoutingFreeSelection):
        fields["threshold"] = selection.theta(model.hidden_size, model.init_method_std)
    if isinstance(selection, LoryPrefixSelection):
        fields["prefix_length"] = selection.lory_segment_length
    return fields


def folded_width(config: Config) -> int:
    """The width of a folded expert: that of the run, rounded up to whole tiles of the kernels.

    The columns that are added are 0 and change no output.
    """
    return -(-config.expert_width // _TILE) * _TILE


def routing_neurons(config: Config) -> int:
    """How many neurons of an expert compute every token. 0: the system has none."""
    selection = config.selection
    if not isinstance(selection, UoESelection):
        return 0
    return selection.routing_neurons(config.expert_width, config.num_experts)


def dispatched_width(config: Config) -> int:
    """The width of an expert without its routing neurons."""
    return config.expert_width - routing_neurons(config)


def num_free_experts(selection: Selection) -> int:
    """The number of free experts, Z."""
    return selection.free_experts if isinstance(selection, FreeExperts) else 0


def low_rank_size(selection: Selection) -> int | None:
    """d_low of experts with a factorized W_g. None: W_g is one matrix."""
    sizes = selection.low_rank_sizes
    return sizes[0][1] if sizes else None


def has_bias(selection: Selection) -> bool:
    """Whether a number per expert is added to the scores for the selection."""
    if isinstance(selection, BiasBalancing):
        return selection.moe_router_enable_expert_bias
    return isinstance(selection, Cutoffs | RoutingFreeSelection)


def _qk_norm(normed: bool, all_heads: bool) -> str | None:
    if not normed:
        return None
    return "all" if all_heads else "head"


def _rule_fields(selection: Selection, num_experts: int) -> dict[str, Any]:
    """The fields of the rule that the system uses in evaluation."""
    rule = system_of(selection).rules(selection).evaluation
    if selection.forced_routing is not None:
        raise InputError(
            f"--load: its experts are forced ({selection.forced_routing}), so it is a benchmark "
            "and not a model to export"
        )
    if rule in (by_previous, by_first):
        return {"rule": "merge"}
    fields_of = _RULES.get(type(rule))
    if fields_of is None:
        reason = _WHY_NOT.get(type(rule), "its rule has no exported form")
        raise InputError(f"--load: --expert-selection {selection.system} is not exported: {reason}")
    fields = fields_of(rule, num_experts + num_free_experts(selection))
    if selection.reads_token_ids:
        fields["rule"] = "hash"  # a table chooses, and the rule weights
    return fields


def _free_fields(selection: Selection) -> dict[str, Any]:
    """The numbers of free experts of each kind, and what a chosen zero expert does."""
    if not num_free_experts(selection):
        return {}
    assert isinstance(selection, FreeExperts)
    fields: dict[str, Any] = {
        "zero_experts": selection.moe_zero_experts,
        "copy_experts": selection.moe_copy_experts,
        "constant_experts": selection.moe_constant_experts,
    }
    if isinstance(selection, FixedFreeExperts):
        fields["zero_expert_gate"] = selection.moe_zero_expert_gate
    return fields


# From a rule, and the number of scores that it sees, to its fields.
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
        "scoring_func": rule.gate.__name__,
    }


def _relu(rule: ReLU, num_scores: int) -> dict[str, Any]:
    return {"rule": "relu", "num_experts_per_tok": num_scores, "norm_topk_prob": False}


_RULES: dict[type, Callable[[Any, int], dict[str, Any]]] = {
    TopK: _topk,
    TopP: _top_p,
    Threshold: _threshold,
    ReLU: _relu,
}
_WHY_NOT: dict[type, str] = {
    ExpertDropout: "each token needs the mean of its whole sequence, which a text that is being "
    "generated does not have yet",
    MovingTopP: "its p is that of the latest step, which no configuration has; take it from "
    "metrics.jsonl and set --moe-inference-top-p",
    BySegment: "experts are chosen for whole segments, and a generated text has no segments",
}
