"""The fields of config.json for the rule of a system in evaluation, in our own architecture.

`moe_parallel.hf` knows the rules topk, top_p, threshold, relu, hash and merge. A rule of another
class is refused, because a subclass may choose differently. `register_rule` adds one that equals a
known rule.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from moe_parallel.balancing.losses import LossContext, load_balancing
from moe_parallel.config import Config, Selection
from moe_parallel.errors import InputError
from moe_parallel.layers.system import system_of
from moe_parallel.selection import topk
from moe_parallel.selection.segments import BySegment, by_first, by_previous
from moe_parallel.selection.topk import TopK, WithoutZeroExperts
from moe_parallel.systems.relu.rule import ReLU
from moe_parallel.systems.smear.rule import ExpertDropout
from moe_parallel.systems.threshold import rule as threshold
from moe_parallel.systems.threshold.rule import Threshold
from moe_parallel.systems.top_p.rule import MovingTopP, TopP

#: From a rule, and the number of scores that it sees, to its fields.
RuleFields = Callable[[Any, int], dict[str, Any]]

#: From the function that gives the probs of chosen experts: scoring_func and norm_topk_prob.
_PROBS: dict[Any, tuple[str, bool]] = {
    topk.softmax_of_selected: ("softmax", True),
    topk.raw_probability: ("softmax", False),
    topk.raw_score: ("raw", False),
    topk.sigmoid_share_of_selected: ("sigmoid", True),
    topk.sigmoid_of_selected: ("sigmoid", False),
}

#: The same for a threshold: scoring_func.
_PROBS_OF_VALUES: dict[Any, str] = {
    threshold.softmax_of_scores: "softmax",
    threshold.sigmoid: "sigmoid",
    threshold.sigmoid_of_value: "sigmoid_of_value",
    threshold.raw_value: "raw_value",
    threshold.softmax_of_chosen: "softmax_of_chosen",
}


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


def loss_fields(config: Config) -> dict[str, Any]:
    """The fields of the load-balancing loss, if the system has one."""
    selection: Any = config.selection
    for make in system_of(selection).losses:
        if make in (load_balancing, load_balancing):
            loss = make(selection, LossContext(sum(config.moe_layers)))
            by_sequence = selection.moe_router_load_balancing_type == "seq_aux_loss"
            tau = getattr(selection, "moe_free_expert_tau", 1.0)
            return {
                "router_aux_loss_coef": loss.coefficient,
                "aux_loss_by_sequence": by_sequence,
                "free_expert_tau": tau,
            }
    return {}


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
